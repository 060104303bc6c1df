"""vLLM's schedulers with the plugin's parts in them: one step, as narrow overrides.

Owns which moments of a step reach the parts. Does not own which parts there are and in which order
(`assembly.py`), what they do at a moment (`step_hooks.py`), or what the server asks of them
(`control.py`).

    add_request              what is wanted of the request: scores, a report
    schedule                 before vLLM's own: prompts of the last step into the tree; the queue's
                             step begins; whether running requests pause
                             during it, as vLLM needs them: the queue's order, and which requests
                             are held back; the overrides under "inside vLLM's step" below
                             after it: what a KV connector loads; admitted requests are counted;
                             the runner gets forced tokens; segments are copied, and the
                             chunks between them get rows
    get_grammar_bitmask      timed; forced runs that are decoded are all that is legal
    update_from_output       before vLLM's own: loads are measured; after it: scored rows,
                             jumps (2), reports, refusals
    _update_request_with_output    accepted drafts are cut where forced text is spelled otherwise
    update_draft_token_ids         drafts of jumped requests are dropped

Inside vLLM's step, for a waiting request:

    _handle_blocked_waiting_request    text that is forced from the start (1)
    _get_local_prefix_cache_hit        with `radix` off, no hit reaches into forced text
    _mamba_block_aligned_split         a pass ends where another request needs a state

Forced tokens enter a request in two places of `JumpForward`: `grammar_is_ready` (1) and
`after_update` (2), which also sends those of (1), before the first token that is sampled.
"""

from __future__ import annotations

import contextlib
import time
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
from sgl_vllm.scheduler.step_times import TimedScheduler
from sgl_vllm.step_hooks import StepHooks


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
        if vllm_config.speculative_config is None:  # then no pass accepts drafts
            vars(self)["_update_request_with_output"] = super()._update_request_with_output
        options = Options.from_mapping((vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
        self.parts = build_parts(self, kv_cache_config, options)
        self._prompts_done: list[Request] = []
        self._prefilling: list[Request] = []
        """Running requests whose prompt is not computed."""
        self._steps = StepCounters()
        self._bitmasks = BitmaskCounters()
        self.sgl_vllm = EngineControl(self.parts, options, vllm_config, self._steps, self._bitmasks)
        self.step_timer = self.sgl_vllm.timer

    # -- a step -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        # Further input of a streaming session comes as a request with the same id.
        if request.request_id not in self.requests:
            for part in self.parts.that_have(StepHooks.expect):
                part.expect(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        parts = self.parts
        for part in parts.that_have(StepHooks.before_schedule):
            part.before_schedule(self._prompts_done)
        with contextlib.ExitStack() as stack:
            for part in parts.that_have(StepHooks.while_scheduling):
                stack.enter_context(part.while_scheduling())
            output = super().schedule(*args, **kwargs)
        self._prompts_done = self._prompts_done_by(output)
        beside: list[tuple[Request, int]] = []
        for part in reversed(parts.that_have(StepHooks.after_schedule)):
            beside += part.after_schedule(output)
        for part in parts.that_have(StepHooks.charge) if beside else ():
            part.charge(beside)
        self._steps.forward_passes += bool(output.num_scheduled_tokens)
        return output

    def _prompts_done_by(self, output: SchedulerOutput) -> list[Request]:
        """The requests whose prompt this step completes.

        The next step may share these prompts, even while this step is in flight, because blocks are
        copied after this step's forward pass.
        """
        admitted = [data.req_id for data in output.scheduled_new_reqs]
        admitted += output.scheduled_cached_reqs.resumed_req_ids
        for name in admitted:
            request, num_tokens = self.requests[name], output.num_scheduled_tokens[name]
            if request.num_computed_tokens - num_tokens < request.num_prompt_tokens:
                self._prefilling.append(request)
            self.sgl_vllm.round_hit(request)
        done: list[Request] = []
        left: list[Request] = []
        for request in self._prefilling:
            if request.status == RequestStatus.RUNNING:
                is_done = request.num_computed_tokens >= request.num_prompt_tokens
                (done if is_done else left).append(request)
        self._prefilling = left
        return done

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        started = time.monotonic()
        bitmasks = super().get_grammar_bitmask(scheduler_output)
        if bitmasks is not None:
            for part in self.parts.that_have(StepHooks.narrow):
                part.narrow(bitmasks)
            self._bitmasks.masked_steps += 1
            self._bitmasks.mask_s += time.monotonic() - started
        return bitmasks

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        for part in self.parts.that_have(StepHooks.before_update):
            part.before_update(scheduler_output, model_runner_output, self.requests)
        results = super().update_from_output(scheduler_output, model_runner_output)
        loaded = model_runner_output.kv_connector_output
        if loaded is not None and loaded.invalid_block_ids:  # prompts are computed again
            self._prefilling = [
                one for one in self.running if one.num_computed_tokens < one.num_prompt_tokens
            ]
        following = [
            part for part in self.parts.that_have(StepHooks.after_update) if part.follows_outputs()
        ]
        if following:
            outputs = [output for result in results.values() for output in result.outputs]
            for part in reversed(following):
                part.after_update(outputs, self.requests)
        return results

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Appends what a pass has sampled: several tokens, if drafts were accepted."""
        for part in self.parts.that_have(StepHooks.cut_accepted):
            part.cut_accepted(request, new_token_ids, is_stale=is_stale)
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """With synchronous scheduling, called after `update_from_output`, so after jumps."""
        super().update_draft_token_ids(draft_token_ids)
        for part in self.parts.that_have(StepHooks.drafts_are_known):
            part.drafts_are_known()

    # -- inside vLLM's step, for a waiting request ------------------------------------------------

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether `request` can be scheduled."""
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready = super()._handle_blocked_waiting_request(request)
        if is_ready and waited_for_grammar:
            for part in self.parts.that_have(StepHooks.grammar_is_ready):
                part.grammar_is_ready(request)
        return is_ready

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The cached blocks of a request.

        At a request's first admission, vLLM counts all of a hit as prompt, so a hit must not reach
        into the forced text that follows the prompt of an opened request. The radix tree caps its
        hits itself. For vLLM's own lookup, the request is cut to one token after its prompt, the
        token that is computed in any case.
        """
        all_token_ids = request._all_token_ids
        if (
            self.parts.radix is None
            and request.num_output_tokens > 1
            and is_first_admission(request)
        ):
            request._all_token_ids = all_token_ids[: request.num_prompt_tokens + 1]
        try:
            found = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        finally:
            request._all_token_ids = all_token_ids
        for part in self.parts.that_have(StepHooks.looked_up):
            part.looked_up(request, num_hit=found[1])
        return found

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
        start = request.num_computed_tokens + sum(num_before)
        if not start and request.num_tokens == 1:
            return 1  # vLLM would pad it with drafts, which the layers would treat as prompt
        for part in self.parts.that_have(StepHooks.cut_to_stop):
            num_new_tokens = part.cut_to_stop(request, start, num_new_tokens)
        return num_new_tokens


class SglScheduler(TimedScheduler, SglSchedulerMixin):
    """Over vLLM's synchronous scheduler."""


class SglAsyncScheduler(TimedScheduler, SglSchedulerMixin, AsyncScheduler):
    """Over vLLM's asynchronous scheduler, the default on GPUs."""
