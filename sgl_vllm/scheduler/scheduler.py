"""vLLM's schedulers with the plugin's parts in them: one step, as narrow overrides.

Owns when each part gets its turn in a step. Does not own which parts there are (`assembly.py`),
what they do, or what the server asks of them (`control.py`).

    add_request              what is wanted of the request: scores, a report, a trace
    schedule                 before vLLM's own: prompts of the last step into the tree; jumps that
                             compete with drafts (1); the queue's step begins; whether running
                             requests pause
                             during it, as vLLM needs them: the queue's order, and which requests
                             are held back; the overrides under "inside vLLM's step" below
                             after it: what a KV connector loads; admitted requests are counted;
                             jumped requests resume; segments are copied, and the chunks
                             between them get rows
    get_grammar_bitmask      timed; forced runs that are decoded are all that is legal
    update_from_output       before vLLM's own: loads are measured; tokens that were appended but
                             not sent (2); after it: scored rows, jumps (3), reports, refusals and
                             traces
    _update_request_with_output    accepted drafts are cut where forced text is spelled otherwise
    update_draft_token_ids         drafts of jumped requests are dropped
    reset_prefix_cache             jumped requests release their blocks

Inside vLLM's step, for a waiting request:

    _handle_blocked_waiting_request    text that is forced from the start (4); whether a jumped
                                       request may run
    _get_local_prefix_cache_hit        with `radix` off, no hit reaches into forced text
    _mamba_block_aligned_split         a pass ends where another request needs a state

Forced tokens enter a request in three places: `JumpForward.open` (4), `before_pass` (1) and
`after_step` (3). `before_update` (2) puts those of (1) and (4) before the token that is sampled
after them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any  # Any: arguments of vLLM's

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.radix.request_record import is_first_admission
from sgl_vllm.scheduler.assembly import build_parts
from sgl_vllm.scheduler.control import EngineControl
from sgl_vllm.scheduler.stats import BitmaskCounters, StepCounters


class SglSchedulerMixin(Scheduler):
    """The parts, over the scheduler that vLLM's resolved configuration asks for.

    Attributes:
        parts: those that this engine has.
        sgl_vllm: what the server asks, by way of `EngineCore.sgl_vllm_call`.
    """

    # Any: arguments of vLLM's that pass through.
    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        options = Options.from_mapping((vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
        self.parts = build_parts(self, kv_cache_config, options)
        self._prompts_done: list[Request] = []
        self._steps = StepCounters()
        self._bitmasks = BitmaskCounters()
        self.sgl_vllm = EngineControl(self.parts, options, vllm_config, self._steps, self._bitmasks)

    # -- a step -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        # Further input of a streaming session comes as a request with the same id.
        if request.request_id not in self.requests:
            if self.parts.select is not None:
                self.parts.select.accept(request)
            for part in self.parts.followers():
                part.expect(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._before_schedule()
        with contextlib.ExitStack() as stack:
            if self.parts.approximate is not None:
                stack.enter_context(self.parts.approximate.leaving_room())
            if self.parts.jump is not None and self.parts.jump.holds_next_pass():
                stack.enter_context(self._nothing_running())
            output = super().schedule(*args, **kwargs)
        self._after_schedule(output)
        return output

    def _before_schedule(self) -> None:
        parts = self.parts
        if parts.radix is not None:
            for request in self._prompts_done:
                parts.radix.index_prompt(request)
        if parts.approximate is not None:
            for request in self._prompts_done:
                parts.approximate.prompt_done(request)
            parts.approximate.before_pass()
        if parts.jump is not None:
            parts.jump.before_pass()
        if parts.queue is not None:
            parts.queue.step_starts()

    @contextlib.contextmanager
    def _nothing_running(self) -> Iterator[None]:
        """While inside, vLLM schedules no running request, and does the rest of its step. Only if
        no request waits, because none may enter `running` meanwhile."""
        paused_running, self.running = self.running, []
        try:
            yield
        finally:
            self.running = paused_running

    def _after_schedule(self, output: SchedulerOutput) -> None:
        parts = self.parts
        if parts.tiers is not None:
            parts.tiers.pass_begins(output)
        if parts.radix is not None:
            self._prompts_done = self._prompts_done_by(output)
        if parts.queue is not None:
            parts.queue.step_ends(output)
        if parts.jump is not None:
            parts.jump.jumped.rewrite_resumed(output)
            parts.jump.jumped.release_one_if_stuck(output)
        if parts.approximate is not None:  # last: it adds rows that are no requests of ours
            in_rows = parts.approximate.after_schedule(output)
            if parts.queue is not None:
                parts.queue.charge(in_rows)
        self._steps.forward_passes += bool(output.num_scheduled_tokens)

    def _prompts_done_by(self, output: SchedulerOutput) -> list[Request]:
        """The requests whose prompt this step completes.

        The next step may share these prompts, even while this step is in flight, because blocks are
        copied after this step's forward pass.
        """
        return [
            request
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if (request := self.requests.get(request_id)) is not None
            and request.num_computed_tokens - num_tokens
            < request.num_prompt_tokens
            <= request.num_computed_tokens
        ]

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        started = time.monotonic()
        bitmasks = super().get_grammar_bitmask(scheduler_output)
        if bitmasks is not None:
            if self.parts.jump is not None:
                self.parts.jump.narrow(bitmasks)
            self._bitmasks.masked_steps += 1
            self._bitmasks.mask_s += time.monotonic() - started
        return bitmasks

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        parts = self.parts
        num_scored_rows = {}
        if parts.select is not None:
            scheduled = map(self.requests.get, scheduler_output.num_scheduled_tokens)
            num_scored_rows = parts.select.num_rows(filter(None, scheduled))
        if parts.tiers is not None:
            parts.tiers.pass_ends(scheduler_output)
        if parts.jump is not None:
            parts.jump.before_update(model_runner_output)
        results = super().update_from_output(scheduler_output, model_runner_output)
        outputs = [output for result in results.values() for output in result.outputs]
        if parts.select is not None and num_scored_rows:
            parts.select.cut_rows(outputs, num_scored_rows)
        if parts.jump is not None:
            parts.jump.after_step(outputs)
        for part in parts.followers():
            part.attach(outputs, self.requests)
        return results

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Appends what a pass has sampled: several tokens, if drafts were accepted."""
        if self.parts.jump is not None:
            self.parts.jump.cut_accepted(request, new_token_ids, is_stale=is_stale)
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """With synchronous scheduling, called after `update_from_output`, so after jumps."""
        super().update_draft_token_ids(draft_token_ids)
        if self.parts.jump is not None:
            self.parts.jump.jumped.drop_drafts()

    # -- inside vLLM's step, for a waiting request ------------------------------------------------

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether `request` can be scheduled. If its grammar has just become ready, the text that
        the grammar forces at the start is appended."""
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready = super()._handle_blocked_waiting_request(request)
        jump = self.parts.jump
        if jump is None or not is_ready:
            return is_ready
        if waited_for_grammar:
            jump.open(request)
        return jump.jumped.may_be_scheduled(request)

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The cached blocks of a request.

        At a request's first admission, vLLM counts all of a hit as prompt, so a hit must not reach
        into the forced text that follows the prompt of an opened request. The radix tree caps its
        hits itself. For vLLM's own lookup, the request is cut to one token after its prompt, the
        token that is computed in any case.
        """
        if self.parts.approximate is not None:
            found = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
            self.parts.approximate.looked_up(request, num_hit=found[1])
            return found
        if (
            self.parts.radix is not None
            or request.num_output_tokens <= 1
            or not is_first_admission(request)
        ):
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        all_token_ids = request._all_token_ids
        request._all_token_ids = all_token_ids[: request.num_prompt_tokens + 1]
        try:
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        finally:
            request._all_token_ids = all_token_ids

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """How many tokens a pass computes of a model with recurrent layers."""
        num_before = num_new_local_computed_tokens, num_external_computed_tokens
        num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *num_before)
        if self.parts.radix is None:
            return num_new_tokens
        start = request.num_computed_tokens + sum(num_before)
        return self.parts.radix.cut_to_stop(request, start, num_new_tokens)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        if reset_running_requests and self.parts.jump is not None:
            self.parts.jump.jumped.release_all()
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)


class SglScheduler(SglSchedulerMixin):
    """Over vLLM's synchronous scheduler."""


class SglAsyncScheduler(SglSchedulerMixin, AsyncScheduler):
    """Over vLLM's asynchronous scheduler, the default on GPUs."""
