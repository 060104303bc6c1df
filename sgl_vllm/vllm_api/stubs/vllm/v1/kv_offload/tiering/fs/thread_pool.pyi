# [tiers]
from collections.abc import Callable, Iterable

class DualQueueThreadPool:
    def enqueue_store(
        self, job_id: int, n_tasks: int, tasks: Iterable[Callable[[], None]]
    ) -> None: ...
    def enqueue_load(
        self, job_id: int, n_tasks: int, tasks: Iterable[Callable[[], None]]
    ) -> None: ...
