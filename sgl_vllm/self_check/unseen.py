"""Canaries stay inside the engine: no KV connector stores them, and no KV event announces them.

Owns what stands in the scheduler in place of the connector and of the publisher of KV events while
a check runs. Does not own with which connectors that is safe (`jump/connectors.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast  # Any: what passes through to the connector

from vllm.distributed.kv_events import NullEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from sgl_vllm.jump.connectors import unfit
from sgl_vllm.part import connector_classes

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class SilentConnector(SupportsHMA):
    """A scheduler's connector that stores nothing, and hides requests and steps from the real one.

    Its workers get in each step what they would get in a step without requests.

    Args:
        connector: the real one, at idle. All other calls go there.
    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self._connector = connector
        self._nothing = connector.build_connector_meta(SchedulerOutput.make_empty())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def on_new_request(self, request: Request) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._nothing

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_finished_partial_tail(self, *args: object) -> bool:
        return False

    def take_events(self) -> Iterable[object]:
        return ()


@contextlib.contextmanager
def canaries_unseen(scheduler: Scheduler) -> Iterator[None]:
    """While inside, nothing that the engine does can be seen outside it. Only at idle.

    A connector that is not known to support this stays in place. Then a check runs only if asked
    for.
    """
    connector, publisher = scheduler.connector, scheduler.kv_event_publisher
    if connector is not None and unfit(connector_classes(connector)) is None:
        scheduler.connector = cast(KVConnectorBase_V1, SilentConnector(connector))
    scheduler.kv_event_publisher = NullEventPublisher()
    try:
        yield
    finally:
        scheduler.kv_cache_manager.take_events()  # of canaries; dropped
        scheduler.connector, scheduler.kv_event_publisher = connector, publisher
