"""Which replica each request goes to, from its first attempt to its end.

Owns the routes of unfinished requests, by request id, and what happens when the choice fails: the
request is then placed by load. Reads request bodies, and does not use Ray, which `ray/router.py`
adapts. One event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from sgl_vllm.degrade import Guard
from sgl_vllm.routing.costs import Load, Route, Worker
from sgl_vllm.routing.prompts import RequestSummary, read_request
from sgl_vllm.routing.router import PrefixRouter

logger = logging.getLogger("ray.serve")

UNAVAILABLE = Load(num_queued_tokens=1 << 40)
"""The load of a replica that cannot take the request."""


class RequestPlacer:
    """Places requests on replicas with a `PrefixRouter`.

    Invariant: each of its routes is finished exactly once: when the request ends, is placed again
    or is canceled, or when its replica has gone.
    """

    def __init__(self, router: PrefixRouter) -> None:
        self.router = router
        self._routes: dict[str, Route] = {}
        self._has_warned = False
        self._guard = Guard("routing by prefix", "a request is placed by load alone", logger)

    def place(
        self,
        request_id: str,
        request: object,
        *,
        lora: str | None,
        open_workers: Collection[Worker],
        num_running: Mapping[Worker, int],
    ) -> Worker | None:
        """The replica for a request, which counts as sent there until `finished`.

        Args:
            request: its body; see `read_request`.
            lora: the adapter's name, if the request is for one.
            open_workers: the replicas that can take it.
            num_running: the requests that replicas are known to have, from all routers.

        Returns:
            None if the caller has to place it by load: it has no prompt, its prompt cannot be read,
            no replica can take it, or routing has failed.
        """
        self.finished(request_id)
        if not open_workers:
            return None
        try:
            summary = read_request(request, lora, request_id)
        except Exception as error:  # a body that the engine will refuse
            self._warn_once(type(error).__name__)
            return None
        if summary is None:
            return None
        route = self._guard.run(self._choose, summary, open_workers, num_running)
        if route is None:
            return None
        if route.worker not in open_workers:
            self.router.finished(route)
            return None
        self._routes[request_id] = route
        return route.worker

    def finished(self, request_id: str, worker: Worker | None = None) -> None:
        """The request has ended, whether it succeeded or failed.

        With `worker`, this counts only if the request has not been placed elsewhere since.
        """
        route = self._routes.get(request_id)
        if route is not None and worker in (None, route.worker):
            del self._routes[request_id]
            self.router.finished(route)

    def _choose(
        self,
        summary: RequestSummary,
        open_workers: Collection[Worker],
        num_running: Mapping[Worker, int],
    ) -> Route:
        loads = {
            worker: self._load(worker, num_running) if worker in open_workers else UNAVAILABLE
            for worker in self.router.workers
        }
        return self.router.choose(
            summary.prompt,
            loads,
            max_output_tokens=summary.max_output_tokens,
            group=summary.group,
            namespace=summary.namespace,
        )

    def _load(self, worker: Worker, num_running: Mapping[Worker, int]) -> Load:
        own = self.router.load(worker)
        return Load(own.num_queued_tokens, max(own.num_running, num_running.get(worker, 0)))

    def _warn_once(self, reason: str) -> None:
        """Log that a request is placed without its prompt. `reason` must not quote the prompt."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "sgl-vllm: a request was placed by load alone, because its prompt could not be "
                "read (%s). Further requests of this kind are not logged.",
                reason,
            )
