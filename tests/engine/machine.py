"""A real scheduler with its KV-cache manager, and no model: what is sampled is made up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from benchmarks.engine_settings import SGL, EngineSettings
from benchmarks.schedulers import engine_request, make_block_hasher, make_scheduler, runner_output
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.scheduler.queue import OrderCounters

MAX_MODEL_LEN = 4096


def check_nothing_is_left(scheduler: Any, may_be_off: bool = False) -> None:
    """At idle every block is free or cached, no request lingers, and the tree is consistent, unless
    an error may have switched it off."""
    assert not scheduler.requests and not scheduler.running
    assert not len(scheduler.waiting) and not scheduler.kv_holding_waiting
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    parts = getattr(scheduler, "parts", None)  # vLLM's own has none
    radix = parts.radix if parts is not None else None
    if radix is not None and not (may_be_off and radix.pool.is_off):
        check_pool(radix.pool)


class Machine:
    """Adds requests, steps, and remembers what came of it.

    Attributes:
        admitted: ids in the order of their first admission.
        computed: scheduled tokens by request.
        ended: ids of those that got their last token.
        num_preemptions: of all.
    """

    def __init__(
        self,
        plugin: dict[str, Any] | None = None,
        *,
        num_blocks: int = 200,
        block_size: int = 32,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 1024,
        async_scheduling: bool = False,
        sliding_windows: tuple[int, ...] = (),
        **scheduler_args: Any,
    ) -> None:
        settings = EngineSettings(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
            sliding_windows=sliding_windows,
            plugin=plugin or {},
        )
        self.scheduler: Scheduler = make_scheduler(SGL, settings, **scheduler_args)
        self._hasher = make_block_hasher(self.scheduler)
        self._names = map(str, itertools.count())
        self.admitted: list[str] = []
        self.computed: Counter[str] = Counter()
        self.ended: list[str] = []
        self.num_preemptions = 0

    @property
    def queue(self) -> Any:
        return self.scheduler.waiting

    @property
    def counters(self) -> OrderCounters:
        return self.scheduler.sgl_vllm.stats().schedule

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        name: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        resumable: bool = False,
        arrival_time: float = 0.0,
        **params: Any,
    ) -> Request:
        """Send a request. It gets `max_tokens` tokens that nobody else gets."""
        request = Request.from_engine_core_request(
            engine_request(
                SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params),
                request_id=name or next(self._names),
                prompt_token_ids=list(prompt),
                cache_salt=cache_salt,
                priority=priority,
                resumable=resumable,
                arrival_time=arrival_time,
            ),
            self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedule, and run what was scheduled."""
        scheduler = self.scheduler
        scheduled = scheduler.schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        self.admitted += [new.req_id for new in scheduled.scheduled_new_reqs]
        ids = list(scheduled.num_scheduled_tokens)
        self.computed.update(scheduled.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            is_done = not request.is_prefill_chunk
            # One more than all before: no reply is ever like another's.
            sampled.append([1_000_000 + self.num_tokens_computed] if is_done else [])
        output = runner_output(ids, sampled)
        for result in scheduler.update_from_output(scheduled, output).values():
            self.ended += [one.request_id for one in result.outputs if one.finish_reason]
        return scheduled

    @property
    def num_tokens_computed(self) -> int:
        return self.computed.total()

    def run(self, max_steps: int = 5000) -> None:
        """Step until everybody has ended; then nothing may be left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        self.check_nothing_is_left()
        radix = self.scheduler.parts.radix
        assert radix is None or radix.is_off or len(radix.tree.watchers) == 0

    def abort(self, *requests: Request) -> None:
        self.scheduler.finish_requests(
            [request.request_id for request in requests], RequestStatus.FINISHED_ABORTED
        )

    def check_nothing_is_left(self) -> None:
        check_nothing_is_left(self.scheduler, may_be_off=True)
