"""Whom vLLM preempts when the cache is full: who loses the fewest computed tokens.

vLLM takes the last of the running requests, the newest. What a preempted request computed stays in
the radix tree until somebody needs the room, and what it shares with others stays as long as they
run. So the one that holds the fewest blocks alone has the least to compute again.
"""

from __future__ import annotations

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sgl_vllm.part import EngineView
from sgl_vllm.radix.manager import RadixKVCacheManager

MAX_PREEMPTIONS = 2
"""Who was preempted so often is spared, so that everybody gets to an end."""


def why_off(engine: EngineView) -> str | None:
    """Why vLLM's choice stays in this engine; None if it can be replaced."""
    scheduler = engine.scheduler
    for part in ("schedule", "radix"):
        if part in engine.off:
            return f"{part} is off ({engine.off[part]})"
    if scheduler.policy != SchedulingPolicy.FCFS:
        return f"the scheduling policy {scheduler.policy.value!r} decides what is preempted"
    if scheduler.connector is not None:
        return "a KV connector is in use"
    if scheduler.use_pp:
        return "pipeline parallelism keeps several steps in flight"
    return None


class CheapestVictim:
    """Puts the request that is cheapest to preempt to the end of `Scheduler.running`.

    Costs nothing while there is a free block for every running request; else O(blocks of all).
    """

    def __init__(self, scheduler: Scheduler, radix: RadixKVCacheManager) -> None:
        self._scheduler = scheduler
        self._radix = radix
        self.num_chosen = 0

    def step_starts(self) -> None:
        running = self._scheduler.running
        if len(running) < 2 or self._radix.tree is None:
            return
        if self._radix.block_pool.get_num_free_blocks() >= len(running):
            return
        victim = min(reversed(running), key=self._loss)
        if victim is not running[-1]:
            running.remove(victim)
            running.append(victim)
            self.num_chosen += 1

    def _loss(self, request: Request) -> tuple[bool, int]:
        """In blocks that nobody else uses. To take one from whom preempting frees nothing would be
        of no use."""
        blocks = self._radix.get_blocks(request.request_id).blocks[0]
        num_alone = sum(block.ref_cnt == 1 for block in blocks)
        return request.num_preemptions >= MAX_PREEMPTIONS or not num_alone, num_alone
