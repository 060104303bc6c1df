"""Which replica gets each request, from the first look at it to its end.

Owns the book of requests under way by their ids, and what happens when the choice goes wrong: the
request is placed by load alone, and a warning logged once. Knows request bodies, and nothing of
Ray; `ray_router` feeds it. One event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from sgl_vllm.routing.prompts import Renderer, read_request
from sgl_vllm.routing.router import Load, PrefixRouter, Route, Worker

logger = logging.getLogger("ray.serve")

CLOSED = Load(num_queued_tokens=1 << 40)
"""As if so much waited there: a replica that cannot take this request."""


class Placement:
    """A `PrefixRouter` fed with requests.

    Invariant: every route it has chosen is finished once: when its request ends, is placed again,
    is cancelled, or its replica has gone.
    """

    def __init__(self, router: PrefixRouter, render: Renderer | None = None) -> None:
        self.router = router
        self._render = render
        self._routes: dict[str, Route] = {}
        self._has_failed = False

    def place(
        self,
        request_id: str,
        request: Any,
        *,
        lora: str | None,
        open_workers: Collection[Worker],
        num_running: Mapping[Worker, int],
    ) -> Worker | None:
        """The replica for a request, which counts as sent there until `finished`.

        Args:
            lora: the adapter's name, if the request is for one.
            open_workers: who can take it. The others are not chosen.
            num_running: requests that replicas are known to have, of other routers too.

        Returns:
            None if its prompt says nothing, nobody can take it, or the choice failed: place it by
            load.
        """
        self.finished(request_id)
        if not open_workers:
            return None
        try:
            asked = read_request(request, lora, request_id, self._render)
            if asked is None:
                return None
            loads = {
                worker: self._load(worker, num_running) if worker in open_workers else CLOSED
                for worker in self.router.workers
            }
            route = self.router.choose(
                asked.units,
                loads,
                max_output_tokens=asked.max_output_tokens,
                group=asked.group,
                namespace=asked.namespace,
            )
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "sgl-vllm: a request was placed by load alone, as routing by prefix failed. "
                    "This is said once."
                )
            return None
        self._routes[request_id] = route
        if route.worker not in open_workers:
            self.finished(request_id)
            return None
        return route.worker

    def finished(self, request_id: str, worker: Worker | None = None) -> None:
        """It ended, well or not; with `worker`, only if it was there and not placed again since."""
        route = self._routes.get(request_id)
        if route is not None and worker in (None, route.worker):
            del self._routes[request_id]
            self.router.finished(route)

    def _load(self, worker: Worker, num_running: Mapping[Worker, int]) -> Load:
        own = self.router.load(worker)
        return Load(own.num_queued_tokens, max(own.num_running, num_running.get(worker, 0)))
