"""The request router for Ray Serve: sends a request to the replica where it costs the least.

Set as the `request_router_class` in Ray's configuration. Owns every contact with Ray's router
interface; the choice is `placement`'s and `PrefixRouter`'s. Ray creates one router in each process
that sends requests to a deployment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any  # Any: options as JSON

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from sgl_vllm.routing.costs import CostModel, Worker
from sgl_vllm.routing.placement import RequestPlacer
from sgl_vllm.routing.router import PrefixRouter


class PrefixCostRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends a request to the replica where compute and waiting cost the least.

    Not first in, first out (`FIFOMixin`), because a replica chosen for one request does not suit
    another. A request without a prompt, or whose routing fails, is placed as Ray does by default:
    on the shorter of two random queues.
    """

    def initialize_state(
        self,
        *,
        block_size: int = 16,
        capacity_tokens: int = 1_000_000,
        max_age_s: float = 3600.0,
        cost: Mapping[str, Any] | None = None,
    ) -> None:
        """Called by Ray with `request_router_kwargs`.

        Args:
            block_size: the granularity of matching, in tokens. 16 suits all engines.
            capacity_tokens: the size of one replica's cache.
            max_age_s: prompts sent longer ago do not count as cached.
            cost: fields of `CostModel`.
        """
        router = PrefixRouter(
            block_size=block_size,
            capacity_tokens=capacity_tokens,
            max_age_s=max_age_s,
            cost=CostModel(**(cost or {})),
        )
        self._placer = RequestPlacer(router)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Called by Ray until a replica accepts the request."""
        if pending_request is None:
            return [_two_of(candidate_replicas)]
        metadata = pending_request.metadata
        pending_request.routing_context.should_backoff = True
        if lora := metadata.multiplexed_model_id:
            able = self.apply_multiplex_routing(pending_request)
            candidate_replicas = [r for r in candidate_replicas if r.replica_id in able]
        available = self.select_available_replicas(candidate_replicas)
        by_id: dict[Worker, RunningReplica] = {one.replica_id: one for one in available}
        request_id = metadata.internal_request_id
        chosen = self._placer.place(
            request_id,
            pending_request.args[0] if pending_request.args else None,
            lora=lora or None,
            open_workers=by_id.keys(),
            num_running=self._num_running(available),
        )
        if chosen is None:
            return [_two_of(available or candidate_replicas)]

        def finish_if_cancelled(future: asyncio.Future[Any]) -> None:
            if future.cancelled():  # before it was sent, so Ray will not report that it completed
                self._placer.finished(request_id)

        pending_request.future.add_done_callback(finish_if_cancelled)
        return [[by_id[chosen]]]

    def _num_running(self, replicas: Iterable[RunningReplica]) -> dict[Worker, int]:
        """From Ray's cache of queue lengths, which includes other routers' requests."""
        cache = self.replica_queue_len_cache
        lengths = {one.replica_id: cache.get(one.replica_id) for one in replicas}
        return {replica_id: length for replica_id, length in lengths.items() if length is not None}

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._placer.finished(internal_request_id, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._set_workers()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_workers()

    def _set_workers(self) -> None:
        self._placer.router.set_workers(dict.fromkeys(self.curr_replicas, False))


def _two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Candidates, of which Ray takes the one with the shorter queue."""
    return random.sample(replicas, min(2, len(replicas)))
