"""The engine around the check: what an idle one has, and that nothing of canaries is seen or left.

Owns what stands in the scheduler in place of the connector and of the publisher of KV events while
a check runs, and how the traces of canaries are removed. Does not own with which connectors a check
is safe (`jump/connectors.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast  # Any: what passes through to the connector

import numpy as np
import torch
from vllm.distributed.kv_events import NullEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.jump.connectors import unfit
from sgl_vllm.part import connector_classes
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.scheduler.assembly import Parts, renew

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

logger = init_logger("vllm.sgl_vllm.self_check")


def idle_problem(engine: EngineCore, parts: Parts) -> str | None:
    """What an engine that has answered every request has kept; None if nothing."""
    scheduler = engine.scheduler
    if scheduler.requests or scheduler.running or scheduler.waiting:
        return f"{len(scheduler.requests)} requests are left"
    pool = scheduler.kv_cache_manager.block_pool
    num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is never used
    if num_used:
        return f"{num_used} blocks of the cache are not free"
    if parts.radix is not None and parts.radix.tree is not None:
        try:
            check_pool(parts.radix.pool)
        except AssertionError as error:
            return f"the radix tree and the blocks disagree ({error})"
    return None


def has_work(engine: EngineCore) -> bool:
    return engine.scheduler.has_requests() or bool(engine.batch_queue)


def take_out_requests(engine: EngineCore, timeout_s: float) -> None:
    """Remove the requests of a run that has failed, and let its steps end. A fault may have left
    requests in any queue, known to the scheduler or not, ended or not."""
    scheduler = engine.scheduler
    queues = (scheduler.waiting, scheduler.kv_holding_waiting)
    requests = {*scheduler.requests.values(), *scheduler.running, *itertools.chain(*queues)}
    with contextlib.suppress(Exception):
        engine.abort_requests([request.request_id for request in requests])
    for request in requests:
        if request in scheduler.running:
            scheduler.running.remove(request)
        for queue in queues:
            if request in queue:
                queue.remove_requests([request])
        scheduler.deferred_waiting.discard(request)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        if request.request_id in scheduler.requests:
            if not request.is_finished():
                request.status = RequestStatus.FINISHED_ABORTED
            scheduler._free_request(request)
        scheduler.finished_req_ids.add(request.request_id)  # the model runner forgets it too
    deadline = time.monotonic() + timeout_s
    while has_work(engine) and time.monotonic() < deadline:
        try:
            engine.post_step(engine.step_fn()[1])
        except Exception:
            logger.debug("a step after a failed run failed, too", exc_info=True)
            if engine.batch_queue:
                engine.batch_queue.clear()
            with contextlib.suppress(Exception):  # what a pass waits for that was not sampled
                engine.model_executor.sample_tokens(None)
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()


def free_blocks(scheduler: Scheduler) -> None:
    """Free what a part that is switched off still holds. Only without requests."""
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        if block.ref_cnt > 0 and not block.is_null:
            block.ref_cnt = 1
            pool.free_blocks([block])


def forget_canaries(engine: EngineCore, parts: Parts) -> None:
    """Empty the cache, and set all counters back to zero.

    Raises:
        RuntimeError: the cache cannot be emptied, so that it holds what canaries have computed.
    """
    scheduler = engine.scheduler
    if not scheduler.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be emptied: blocks are still in use")
    scheduler.make_stats()  # what the next report would count is taken out, and dropped
    if hasattr(engine, "_iteration_index"):
        engine._iteration_index = 0
    renew(parts)


@contextlib.contextmanager
def undisturbed(engine: EngineCore, scheduler: Scheduler) -> Iterator[None]:
    """While inside, nothing that the engine does can be seen outside it. Only at idle.

    A connector that is not known to support this stays in place. Then a check runs only if asked
    for. Afterwards the random generators of this process have their old state (those of workers
    are not used: canaries are greedy and have a seed), and structured output its old backend, which
    vLLM would choose for the first structured request.
    """
    connector, publisher = scheduler.connector, scheduler.kv_event_publisher
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    manager = engine.structured_output_manager
    backend = manager.backend
    if connector is not None and unfit(connector_classes(connector)) is None:
        scheduler.connector = cast(KVConnectorBase_V1, SilentConnector(connector))
    scheduler.kv_event_publisher = NullEventPublisher()
    try:
        yield
    finally:
        scheduler.kv_cache_manager.take_events()  # of canaries; dropped
        scheduler.connector, scheduler.kv_event_publisher = connector, publisher
        if manager.backend is not backend:
            manager.backend = backend
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


class SilentConnector(SupportsHMA):
    """A scheduler's connector that stores nothing, and hides requests and steps from the real one.

    Its workers get in each step what they would get in a step without requests.

    Args:
        connector: the real one, at idle. All calls but those in `_ANSWERS` go there.
    """

    _ANSWERS: Mapping[str, object] = {
        "on_new_request": None,
        "get_num_new_matched_tokens": (0, False),
        "update_state_after_alloc": None,
        "register_finished_partial_tail": False,
        "take_events": (),
    }

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self._connector = connector
        self._nothing = connector.build_connector_meta(SchedulerOutput.make_empty())

    def __getattr__(self, name: str) -> Any:
        if name in self._ANSWERS:
            return lambda *args, **kwargs: self._ANSWERS[name]
        return getattr(self._connector, name)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._nothing

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
