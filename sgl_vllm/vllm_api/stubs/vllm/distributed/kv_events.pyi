# [rank_routing, kv_events, self_check]
from typing import Any

class KVEventBatch:
    events: list[Any]  # of several kinds, told apart by their names

class EventPublisher: ...
class NullEventPublisher(EventPublisher): ...

class ZmqEventPublisher:
    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None: ...
