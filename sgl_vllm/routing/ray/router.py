"""The request router for Ray Serve: to the replica where a request costs the least compute.

Named in Ray's own configuration as `sgl_vllm.routing.ray.router:PrefixCostRouter`, the
`request_router_class`. Owns every contact with Ray's router interface; what is chosen and why is in
`placement` and `routing`. Ray makes one router for each process that sends requests to a
deployment.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from sgl_vllm.routing.kv_events import Followers, KVEventSource
from sgl_vllm.routing.placement import Placement
from sgl_vllm.routing.ray.rendering import renderer_of
from sgl_vllm.routing.router import CostModel, PrefixRouter, Worker

logger = logging.getLogger("ray.serve")

EVENTS_KEY = "sgl_vllm_kv_events"
"""In a replica's routing stats: the fields of its `KVEventSource`."""


class PrefixCostRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends a request to the replica with the least to compute and to wait for.

    It is not first in, first out (`FIFOMixin`): a replica that was chosen for one request is no use
    to another. A request without a prompt, or one whose routing failed, is placed as Ray does by
    default, on the shorter queue of two.
    """

    def initialize_state(
        self,
        *,
        block_size: int = 16,
        capacity_tokens: int = 1_000_000,
        max_age_s: float = 3600.0,
        cost: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
    ) -> None:
        """Ray calls it with `request_router_kwargs`.

        Args:
            block_size: tokens per block of the engines. Their KV events need it exactly; without
                events it is how finely prompts are told apart, and 16 is good for all.
            capacity_tokens: of one replica's cache, without events.
            max_age_s: what a replica was sent so long ago is not counted on, without events.
            cost: fields of `CostModel`.
            tokenizer: the model's, by folder or name. With it prompts are compared by their tokens,
                and the KV events of replicas that publish them (`ray_server`) are followed; without
                it by their texts.
        """
        router = PrefixRouter(
            block_size=block_size,
            capacity_tokens=capacity_tokens,
            max_age_s=max_age_s,
            cost=CostModel(**(cost or {})),
        )
        self._placement = Placement(router, renderer_of(tokenizer) if tokenizer else None)
        self._follows_events = tokenizer is not None
        self._followers = Followers(router.apply_events, self._not_followed, self._event_loop)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ray asks until somebody takes the request."""
        if pending_request is None:
            return [_two_of(candidate_replicas)]
        metadata = pending_request.metadata
        pending_request.routing_context.should_backoff = True
        if lora := metadata.multiplexed_model_id:
            able = self.apply_multiplex_routing(pending_request)
            candidate_replicas = [one for one in candidate_replicas if one.replica_id in able]
        available = self.select_available_replicas(candidate_replicas)
        by_id: dict[Worker, RunningReplica] = {one.replica_id: one for one in available}
        request_id = metadata.internal_request_id
        chosen = self._placement.place(
            request_id,
            pending_request.args[0] if pending_request.args else None,
            lora=lora or None,
            open_workers=by_id.keys(),
            num_running=self._num_running(available),
        )
        if chosen is None:
            return [_two_of(available or candidate_replicas)]

        def give_up(future: asyncio.Future[Any]) -> None:
            if future.cancelled():  # before it was sent: nobody else will say that it has ended
                self._placement.finished(request_id)

        pending_request.future.add_done_callback(give_up)
        return [[by_id[chosen]]]

    def _num_running(self, replicas: Iterable[RunningReplica]) -> dict[Worker, int]:
        """From Ray's cache of queue lengths, which knows of other routers' requests too."""
        cache = self.replica_queue_len_cache
        lengths = {one.replica_id: cache.get(one.replica_id) for one in replicas}
        return {replica_id: length for replica_id, length in lengths.items() if length is not None}

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._placement.finished(internal_request_id, replica_id)

    # -- who there is ---------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._set_workers()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_workers()

    def _set_workers(self) -> None:
        followers = self._followers
        followers.keep(self.curr_replicas)
        if self._follows_events:
            for replica_id, replica in self.curr_replicas.items():
                if stats := (replica.routing_stats or {}).get(EVENTS_KEY):
                    followers.follow(replica_id, KVEventSource(**stats))
        self._placement.router.set_workers({one: one in followers for one in self.curr_replicas})

    def _not_followed(self, replica_id: Worker, error: BaseException | None) -> None:
        logger.error(
            "sgl-vllm: the KV events of %s cannot be followed. What it has cached is guessed "
            "from what it is sent.",
            replica_id,
            exc_info=error,
        )
        self._set_workers()


def _two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Ray takes the one with the shorter queue."""
    return random.sample(replicas, min(2, len(replicas)))
