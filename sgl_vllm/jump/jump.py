"""What a jump does to a request: forced tokens are appended, and one forward pass computes all.

Owns appending forced tokens. Does not own which tokens are forced (`forced_source.py`), nor how the
model runner gets them (`vllm_api/runners/`).

    step n     samples token t                       KV of [0, t) is computed
    jump       appends forced f1 .. fk               the request goes on running
    step n+1   computes t, f1 .. fk in one row, samples the next undecided token

With asynchronous scheduling, the next step is in flight when t arrives. It computes t, as it
should. The token that it samples is stale, because f1 follows t:

    step n     samples token t                       in flight: step n+1 computes t
    jump       appends f1 .. fk                      the sample of step n+1 will be dropped
    step n+2   computes f1 .. fk in one row          step n+1 arrives, its sample is dropped

Idea: jump-forward decoding with a compressed finite state machine (arXiv 2312.07104, section 4).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol  # Any: counters
from weakref import WeakSet

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.jump import part
from sgl_vllm.jump.counters import JumpCounters
from sgl_vllm.jump.forced_logprobs import joined, rows_of_forced
from sgl_vllm.jump.forced_source import ForcedSource
from sgl_vllm.jump.openings import Openings
from sgl_vllm.jump.short_runs import ShortRuns
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.vllm_api.runners import kind_of
from sgl_vllm.vllm_api.runners.runner import ForcedRow, forced_in, send_forced


class JumpListener(Protocol):
    """Something that records forced text."""

    def __call__(self, request: Request, start: int, end: int, *, is_jump: bool) -> None:
        """Tokens [start, end) of the output of `request` are forced. Unless this is a jump, they
        will be decoded, if the request does not end before."""


class JumpForward(StepHooks):
    """Jumps the requests of one scheduler.

    After every step, the output of a request whose grammar forces tokens ends with all of them,
    or the request decodes them (`short_runs.py`). After an unexpected error its request decodes
    token by token, or ends with an error if tokens were already taken.

    Args:
        mode: what counts as forced; see the option `jump_mode`.
        listeners: called whenever output tokens are forced.
    """

    def __init__(self, scheduler: Scheduler, mode: str, *listeners: JumpListener) -> None:
        config = scheduler.vllm_config
        self._scheduler = scheduler
        self.listeners = [*listeners]
        self._limits = part.limits_of(scheduler)
        self.counters = JumpCounters()
        self._may_hold = bool(config.scheduler_config.async_scheduling)
        manager = scheduler.structured_output_manager
        self._source = ForcedSource(manager, mode, self.counters, learns=self._may_hold)
        self.openings = Openings(scheduler)
        self._short_runs = ShortRuns()
        self._not_sent: dict[Request, None] = {}
        """Requests with forced tokens that the model runner does not have yet."""
        self._is_canonical = mode == "canonical"
        self._has_drafts = config.speculative_config is not None
        self._is_recurrent = scheduler.has_mamba_layers
        self._cut: WeakSet[Request] = WeakSet()
        """Requests that have lost accepted drafts in this step."""
        self._has_sampled = False
        """Whether the step that is being read has sampled within a grammar."""

    @property
    def num_errors(self) -> int:
        """Unexpected errors so far. Each is in the log."""
        return self.counters.errors

    def sections(self) -> Mapping[str, Any]:
        return {"jump_forward": copy.copy(self.counters)}

    # -- before a forward pass --------------------------------------------------------------------

    def before_schedule(self, prompts_done: Sequence[Request]) -> None:
        """With recurrent layers, requests that jump decode without drafts: a jump may drop what a
        pass in flight accepts, and a recurrent layer cannot take it back."""
        if self._has_drafts and self._is_recurrent:
            for request in self._scheduler.running:
                if request.spec_token_ids and part.may_jump(request, self._limits):
                    request.spec_token_ids = []

    def cut_to_stop(self, request: Request, start: int, num_new_tokens: int) -> int:
        """When vLLM admits a request of which one token is left, it adds placeholders of drafts,
        which may be accepted. Leaves them out of a request that may jump."""
        num_padded = start + num_new_tokens - request.num_tokens
        if (
            self._has_drafts
            and request.status != RequestStatus.RUNNING
            and 0 < num_padded < num_new_tokens
            and part.may_jump(request, self._limits)
        ):
            return num_new_tokens - num_padded
        return num_new_tokens

    def grammar_is_ready(self, request: Request) -> None:
        """Append the text forced at the start to a request that has never been scheduled."""
        if request.num_output_tokens or not part.may_open(request, self._limits):
            return
        if self._scheduler.connector is not None and request.kv_transfer_params:
            return  # another engine has computed the KV of the prompt, and of no more
        forced = self._source.take_opening(request)
        num_open = self._num_before_end(request, forced)
        num_left = len(forced) - num_open
        if not forced or (num_left and not self._source.take_back(request, num_left)):
            return
        self.openings.add(request, forced[:num_open], forced[num_open] if num_left else None)
        if num_open:
            request.append_output_token_ids(forced[:num_open])
            self._not_sent[request] = None
            self._count_jump(request, 0)

    def while_scheduling(self) -> AbstractContextManager[None]:
        return nothing_running(self._scheduler) if self.holds_next_pass() else nullcontext()

    def holds_next_pass(self) -> bool:
        """Whether the next pass waits for the one in flight: if all running requests are likely
        enough to jump first, the pass would compute only stale tokens.

        The drafts of a pass that waits are dropped: vLLM masks what follows a draft only while a
        step is in flight.
        """
        scheduler = self._scheduler
        if not self._may_hold or not scheduler.running or len(scheduler.waiting):
            return False
        if scheduler.kv_holding_waiting:
            return False
        likelihood = 1.0
        for request in scheduler.running:
            if not request.num_output_placeholders or request.is_prefill_chunk:
                return False  # it has no token in flight
            if request in self._short_runs or not part.may_jump(request, self._limits):
                return False
            likelihood *= self._source.likelihood(request)
            if likelihood < part.WORTH_WAITING:
                return False
        self.counters.held_passes += 1
        for request in scheduler.running:
            request.spec_token_ids = []
        return True

    def after_schedule(self, output: SchedulerOutput) -> Iterable[tuple[Request, int]]:
        """The model runner gets the forced tokens of the requests that run in this step."""
        if not self._not_sent:
            return ()
        scheduler = self._scheduler
        new = {data.req_id for data in output.scheduled_new_reqs}
        restarted = new | output.scheduled_cached_reqs.resumed_req_ids
        rows: dict[str, ForcedRow] = {}
        for request in list(self._not_sent):
            request_id = request.request_id
            has_ended = scheduler.requests.get(request_id) is not request
            if not has_ended and request_id not in output.num_scheduled_tokens:
                continue  # it was preempted, or this step has no room for it
            del self._not_sent[request]
            if has_ended or (request_id in new and kind_of(scheduler).adds_with_output):
                continue
            start = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            if request_id in restarted:
                start = request.num_prompt_tokens
            rows[request_id] = ForcedRow(start, request._all_token_ids[start:])
        if rows:
            send_forced(output, rows)
        return ()

    def narrow(self, masks: GrammarOutput) -> None:
        self._short_runs.narrow(masks, self._scheduler.requests)

    # -- beside speculative decoding --------------------------------------------------------------

    def drafts_are_known(self) -> None:
        """With synchronous scheduling, that is after jumps."""
        for request in self._not_sent:
            request.spec_token_ids = []

    def cut_accepted(self, request: Request, tokens: list[int], *, is_stale: bool) -> None:
        """Drop accepted drafts from where they write forced text in other tokens than a jump, so
        that an answer does not depend on drafts.

            accepted    d1 d2 d3 d4, and t sampled after them; f1 f2 are forced after d2
            kept        all of them               if d3 d4 are f1 f2
                        d1 d2                     otherwise: the jump appends f1 f2

        In exact mode no other tokens are legal.

        Args:
            is_stale: the request was preempted since, so vLLM has reset its counts.
        """
        if len(tokens) < 2 or not self._is_canonical or not part.may_jump(request, self._limits):
            return
        num_kept = self._source.num_canonical(request, tokens)
        num_dropped = len(tokens) - num_kept
        if not num_dropped:
            return
        del tokens[num_kept:]
        self._cut.add(request)
        if not is_stale:  # as vLLM does for drafts that are rejected
            if request.num_computed_tokens > 0:
                request.num_computed_tokens -= num_dropped
            if request.num_output_placeholders > 0:
                request.num_output_placeholders -= num_dropped

    # -- after a forward pass ---------------------------------------------------------------------

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        self._has_sampled = scheduled.has_structured_output_requests
        self.openings.replace_sampled(sampled)
        graph = sampled.cudagraph_stats
        if graph is not None and forced_in(scheduled):
            self.counters.outside_full_graphs += graph.runtime_mode != "FULL"

    def follows_outputs(self) -> bool:
        return self._has_sampled

    def after_update(
        self, outputs: Sequence[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Append forced tokens to every request that has just got a token. A request whose jump
        fails partway ends with an error; the others continue."""
        for output in outputs:
            self.openings.send(output)
            if output.finish_reason is not None or not output.new_token_ids:
                continue
            request = unfinished.get(output.request_id)
            if request is None or not part.may_jump(request, self._limits):
                continue
            is_running = request.status == RequestStatus.RUNNING
            try:
                self._jump(request, output)
            except Exception:
                # Its grammar may be ahead of its output, so it cannot decode token by token.
                self._source.record(request, "ends with an error")
                request.status = RequestStatus.FINISHED_ERROR
                output.finish_reason = request.get_finished_reason()
            if request.is_finished():
                self._end(request, output, is_running)
        self._cut.clear()

    def _jump(self, request: Request, output: EngineCoreOutput) -> None:
        """Append the tokens forced after the last one of `request`.

        A request that was preempted while its token was in flight computes all of them again.
        """
        is_running = request.status == RequestStatus.RUNNING
        forced = [] if self._short_runs.has_next(request) else self._take(request)
        if not forced and request not in self._cut:
            return
        if is_running:
            self._drop_in_flight(request)
        if forced:
            self._append(request, forced, output)
        elif is_running:  # a jump has failed, and the worker has more tokens than vLLM
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.spec_token_ids = []  # drafts that the forced tokens have overtaken
        self._not_sent[request] = None

    def _take(self, request: Request) -> list[int]:
        """The forced tokens, if they end the request or a jump over them pays. Otherwise none, and
        the request decodes them."""
        forced = self._source.take(request)
        if (
            not request.num_in_flight_tokens
            or (self._is_canonical and self._has_drafts)  # which might spell the run otherwise
            or len(forced) >= part.LEAST_RUN
            or self._num_before_end(request, forced) < len(forced)
        ):
            return forced
        is_back = bool(forced) and self._source.take_back(request, len(forced))
        if is_back and not self._has_drafts:
            self._short_runs.begin(request, forced)
            self._tell(request, request.num_output_tokens, len(forced), is_jump=False)
        return []

    def _drop_in_flight(self, request: Request) -> None:
        """Drop what forward passes in flight will sample for `request`; the KV that they compute
        for its known tokens stays. To be called before forced tokens are appended."""
        if request.num_in_flight_tokens:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            self.counters.stale_tokens += request.num_output_placeholders
            request.num_output_placeholders = 0

    def _append(self, request: Request, forced: list[int], output: EngineCoreOutput) -> None:
        """Append forced tokens up to the first stop condition, as if each had been sampled."""
        params, num_before = request.sampling_params, request.num_output_tokens
        num_unstoppable = 0
        if params is not None and params.repetition_detection is None:
            num_unstoppable = self._num_before_end(request, forced)
        request.append_output_token_ids(forced[:num_unstoppable])
        for token in forced[num_unstoppable:]:
            request.append_output_token_ids(token)
            if check_stop(request, self._scheduler.max_model_len):
                output.finish_reason = request.get_finished_reason()
                output.stop_reason = request.stop_reason
                break
        appended = forced[: request.num_output_tokens - num_before]
        rows = output.new_logprobs
        if rows is not None:
            output.new_logprobs = joined(rows, rows_of_forced(appended, rows, request))
        output.new_token_ids = [*output.new_token_ids, *appended]
        self._count_jump(request, num_before)

    def _num_before_end(self, request: Request, forced: Sequence[int]) -> int:
        """How many of the tokens forced after what `request` has come before the one that ends it;
        all of them if none does."""
        params = request.sampling_params
        assert params is not None
        room = min(request.max_tokens, self._scheduler.max_model_len - request.num_prompt_tokens)
        room -= request.num_output_tokens + 1
        stops = {params.eos_token_id, *(params.stop_token_ids or ())}
        num_before_stop = next((i for i, token in enumerate(forced) if token in stops), len(forced))
        return max(0, min(room, num_before_stop))

    def _count_jump(self, request: Request, start: int) -> None:
        """The output of `request` is forced from `start` on."""
        num_forced = request.num_output_tokens - start
        self.counters.jumps += 1
        self.counters.forced_tokens += num_forced
        self._tell(request, start, num_forced, is_jump=True)

    def _tell(self, request: Request, start: int, num_forced: int, *, is_jump: bool) -> None:
        for listener in self.listeners:
            listener(request, start, start + num_forced, is_jump=is_jump)

    def _end(self, request: Request, output: EngineCoreOutput, is_running: bool) -> None:
        """Free a request that has ended by forced tokens, which no pass will compute. What a KV
        connector answers goes with its last output."""
        scheduler = self._scheduler
        if is_running:
            scheduler.running = remove_all(scheduler.running, {request})
        else:
            scheduler.waiting.remove_requests([request])
            scheduler.deferred_waiting.discard(request)
        if scheduler.connector is None:
            scheduler._free_request(request)
            return
        # A connector finds what to store of an ended request by the hashes of its blocks.
        num_known = min(request.num_computed_tokens, request.num_tokens)
        del request.block_hashes[num_known // scheduler.hash_block_size :]
        freed = scheduler._free_request(request)
        params = freed[0] if isinstance(freed, tuple) else freed
        output.kv_transfer_params = params if isinstance(params, dict) else None


@contextmanager
def nothing_running(scheduler: Scheduler) -> Iterator[None]:
    """While inside, vLLM schedules no running request, and does the rest of its step. Only if no
    request waits, because none may enter `running` meanwhile."""
    paused_running, scheduler.running = scheduler.running, []
    try:
        yield
    finally:
        scheduler.running = paused_running
