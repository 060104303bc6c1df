from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

class EngineCore:
    scheduler: Scheduler
    model_executor: Executor  # [radix_slot_copy]
    request_block_hasher: Callable[[Request], list[BlockHash]] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
