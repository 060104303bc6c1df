"""The state of the engine before the check: no requests, an empty cache, counters at zero.

Owns what an idle engine looks like, and how the traces of canaries are removed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.scheduler.assembly import Parts, renew

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore


def idle_problem(scheduler: Scheduler, parts: Parts) -> str | None:
    """What an engine that has answered every request has kept; None if nothing."""
    if scheduler.requests or scheduler.running or scheduler.waiting:
        return f"{len(scheduler.requests)} requests are left"
    pool = scheduler.kv_cache_manager.block_pool
    num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is never used
    if num_used:
        return f"{num_used} blocks of the cache are not free"
    if parts.radix is not None and parts.radix.tree is not None:
        try:
            parts.radix.pool.check_invariants()
        except AssertionError as error:
            return f"the radix tree and the blocks disagree ({error})"
    return None


def take_out(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Remove requests that an abort does not reach: a fault may have left them in any queue, known
    to the scheduler or not, ended or not."""
    for request in requests:
        if request in scheduler.running:
            scheduler.running.remove(request)
        for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
            if request in queue:
                queue.remove_requests([request])
        scheduler.deferred_waiting.discard(request)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        if request.request_id in scheduler.requests:
            if not request.is_finished():
                request.status = RequestStatus.FINISHED_ABORTED
            scheduler._free_request(request)
        scheduler.finished_req_ids.add(request.request_id)  # the model runner forgets it too


def end_steps(scheduler: Scheduler) -> None:
    """Count every step as processed, and free what waits for one. Only when none is in flight."""
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()


def make_idle(scheduler: Scheduler) -> None:
    """Free what a part that is switched off still holds: requests and unused blocks."""
    take_out(scheduler, [*scheduler.requests.values()])
    end_steps(scheduler)
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
def random_generators_kept() -> Iterator[None]:
    """Give the random generators of this process the state that they had before. Those of workers
    and of devices are not used: canaries are greedy and have a seed."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


@contextlib.contextmanager
def backend_kept(engine: EngineCore) -> Iterator[None]:
    """Give the engine the structured-output backend that it had before. vLLM makes one for the
    first structured request, by what it names, and keeps it; canaries must not choose it."""
    manager = engine.structured_output_manager
    backend = manager.backend
    try:
        yield
    finally:
        if manager.backend is not backend:
            manager.backend = backend
