import asyncio
from typing import Any

class ReplicaID: ...

class RunningReplica:
    @property
    def replica_id(self) -> ReplicaID: ...

class RequestMetadata:
    multiplexed_model_id: str
    internal_request_id: str

class RoutingContext:
    should_backoff: bool

class PendingRequest:
    args: list[Any]
    metadata: RequestMetadata
    routing_context: RoutingContext
    future: asyncio.Future[RunningReplica]

class ReplicaQueueLengthCache:
    def get(self, replica_id: ReplicaID) -> int | None: ...

class LocalityMixin: ...

class MultiplexMixin:
    def apply_multiplex_routing(
        self, pending_request: PendingRequest | None = ...
    ) -> set[ReplicaID]: ...

class RequestRouter:
    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]: ...
    @property
    def replica_queue_len_cache(self) -> ReplicaQueueLengthCache: ...
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = ...,
    ) -> list[list[RunningReplica]]: ...
    def select_available_replicas(
        self, candidates: list[RunningReplica] | None = ...
    ) -> list[RunningReplica]: ...
    def update_replicas(self, replicas: list[RunningReplica]) -> None: ...
    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None: ...
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None: ...
