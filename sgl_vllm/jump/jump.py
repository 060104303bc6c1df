"""What a jump does to a request: forced tokens are appended, the KV is kept, one pass computes all.

Owns: which requests may jump, and moving one so that vLLM resumes it with its blocks. Does not own
what is forced (`fsm/vllm/forced_tokens.py`).

    step n     samples token t                       KV of [0, t) computed
    jump       appends forced f1 .. fk               request leaves `running` for
                                                     `kv_holding_waiting`, blocks and all
    step n+1   computes t, f1 .. fk in one pass, samples the next undecided token

vLLM drains `kv_holding_waiting` before anything else and resumes its requests like a streaming
session that got more input. On the V1 runner they must then carry all their tokens as the prompt
(`rewrite_resumed`); the V2 runner is told them apart from the prompt by vLLM. Requests that hold
blocks while they wait cannot be preempted by vLLM, so a step that could schedule nothing must
release one (`release_one_if_stuck`).

With asynchronous scheduling the next step is in flight when t arrives. It computes t, which is as
it should be, and samples a token after it that is stale, for f1 follows:

    step n     samples token t                       in flight: step n+1 computes t
    jump       appends f1 .. fk                      what step n+1 samples will be dropped
    step n+2   computes f1 .. fk in one pass         step n+1 arrives, and is dropped

A pattern that begins with forced text is opened before the first pass (`open`): the text is output
already, but nothing of it is sent before that pass has sampled.

    waiting    the grammar is ready                  prompt, f1 .. fk
    step 1     computes all of it in one pass, samples the first undecided token t
    output     f1 .. fk, t                           (and what is forced after t)

Idea: jump-forward decoding of the compressed finite state machine (arXiv 2312.07104, section 4).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.counters import counter
from sgl_vllm.fsm.vllm.forced_tokens import ForcedTokens
from sgl_vllm.jump import part
from sgl_vllm.jump.forced_logprobs import joined, rows_of_forced
from sgl_vllm.jump.report import ForcedReports
from sgl_vllm.jump.unique import UniqueTokens
from sgl_vllm.scheduler.traces import RequestTraces

logger = init_logger("vllm.sgl_vllm.jump")

MAX_ERRORS = 8
"""So many unexpected errors switch jump-forward off."""


@dataclass(slots=True)
class JumpCounters:
    """Jumps since start."""

    jumps: int = counter("Runs of forced tokens appended to an output.", unit="runs")
    forced_tokens: int = counter("Tokens in these runs.", unit="tokens")
    stale_tokens: int = counter(
        "Tokens sampled by a forward pass that was in flight at a jump, and dropped.",
        unit="tokens",
    )
    released_when_stuck: int = counter(
        "Jumped requests whose blocks were released because nothing else could run.",
        unit="requests",
    )
    errors: int = counter(
        "Unexpected errors in a jump. Each is in the log.", unit="errors", metric="jump_errors"
    )


@dataclass(slots=True)
class Opening:
    """What the output of a request begins with, as long as none of it is sent."""

    request: Request
    tokens: list[int]
    last: int | None
    """If the next forced token ends the request: it. No token may follow it, so it takes the place
    of the one that the first pass samples."""


class JumpForward:
    """Jumps the requests of one scheduler. Remembers who has jumped and not run again, and who was
    opened and has not had a token yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        mode: str,
        reports: ForcedReports,
        traces: RequestTraces | None = None,
    ) -> None:
        """`mode`: what counts as forced; see `config.Options.jump_mode`."""
        self._scheduler = scheduler
        self._reports = reports
        self._traces = traces
        manager = scheduler.structured_output_manager
        self._forced: ForcedTokens | UniqueTokens = (
            ForcedTokens(manager) if mode == "canonical" else UniqueTokens(manager)
        )
        logprobs_mode = scheduler.vllm_config.model_config.logprobs_mode
        self._has_logprobs = logprobs_mode in ("raw_logprobs", "processed_logprobs")
        self._given_up: WeakSet[Request] = WeakSet()
        self._jumped: WeakSet[Request] = WeakSet()
        self._num_as_prompt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """How many tokens of its output the V1 runner takes for the prompt of a request."""
        self._openings: dict[str, Opening] = {}
        self.counters = JumpCounters()

    def may_jump(self, request: Request) -> bool:
        return part.may_jump(request, has_logprobs=self._has_logprobs)

    # -- before the first pass ----------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Append what is forced at the very start to a request that has never been scheduled.

        What ends a request is not appended, because vLLM ends requests by what a pass samples.
        """
        if request.num_output_tokens or not self.may_jump(request):
            return
        assert request.sampling_params is not None
        if request.sampling_params.repetition_detection is not None:  # it may end anywhere
            return
        forced = self._take(request)
        if not forced:
            return
        num_open = self._num_before_end(request, forced)
        if num_open < len(forced) and not self._take_back(request, len(forced) - num_open):
            return
        opening = Opening(request, forced[:num_open], next(iter(forced[num_open:]), None))
        self._openings[request.request_id] = opening
        if opening.tokens:
            request.append_output_token_ids(opening.tokens)
            self._jumped.add(request)
            self._note_jump(request, 0, num_open)

    def _num_before_end(self, request: Request, forced: list[int]) -> int:
        """How many of the first tokens of an output come before the one that ends it."""
        params = request.sampling_params
        assert params is not None
        limit = self._scheduler.max_model_len - request.num_prompt_tokens
        room = min(request.max_tokens, limit) - 1
        stops = {params.eos_token_id, *(params.stop_token_ids or ())}
        num_before_stop = next((i for i, t in enumerate(forced) if t in stops), len(forced))
        return max(0, min(room, num_before_stop))

    def before_update(self, model_output: ModelRunnerOutput) -> None:
        """Put the forced token that ends a request in the place of the sampled one."""
        for request_id, opening in list(self._openings.items()):
            if self._scheduler.requests.get(request_id) is not opening.request:  # given up
                del self._openings[request_id]
            elif opening.last is not None and model_output.sampled_token_ids:
                index = model_output.req_id_to_index.get(request_id)
                if index is not None and model_output.sampled_token_ids[index]:
                    model_output.sampled_token_ids[index] = [opening.last]

    # -- after every pass ---------------------------------------------------------------------

    def after_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Append what is forced to every request that has just got a token."""
        scheduler = self._scheduler
        left: set[Request] = set()
        for output in outputs if self._openings else ():
            if output.new_token_ids:
                opening = self._openings.pop(output.request_id, None)
                if opening is not None:
                    _put_before(output, opening)
        for output in outputs:
            if output.finish_reason is not None or not output.new_token_ids:
                continue
            request = scheduler.requests.get(output.request_id)
            if request is None or not self.may_jump(request):
                continue
            forced = self._take(request)
            if forced and request.status == RequestStatus.RUNNING:
                self._drop_in_flight(request)
                self._append(request, forced, output)
                left.add(request)
            elif forced:  # preempted while the token was in flight: it waits to compute all again
                self._append(request, forced, output)
                if request.is_finished():
                    scheduler.waiting.remove_requests([request])
                    scheduler.deferred_waiting.discard(request)
                    scheduler._free_request(request)
        if not left:
            return
        scheduler.running = remove_all(scheduler.running, left)
        for request in left:
            if request.is_finished():
                scheduler._free_request(request)
                continue
            request.status = RequestStatus.WAITING
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            self._jumped.add(request)
        # In the order of `running`, so that who was first stays first.
        for output in outputs:
            request = scheduler.requests.get(output.request_id)
            if request is not None and request in left:
                scheduler._enqueue_waiting_request(request)

    def _take(self, request: Request) -> list[int]:
        """What is forced now. After an unexpected error the request goes on token by token; after
        many, all do."""
        if self.failed or request in self._given_up:
            return []
        try:
            return self._forced.take(request)
        except Exception:
            self._give_up(request)
            return []

    def _take_back(self, request: Request, num_tokens: int) -> bool:
        """Make the grammar forget the last tokens that it accepted; whether it did."""
        structured = request.structured_output_request
        assert structured is not None
        try:
            grammar = structured.grammar
            assert isinstance(grammar, StructuredOutputGrammar)
            grammar.rollback(num_tokens)
            return True
        except Exception:
            self._give_up(request)
            return False

    def _give_up(self, request: Request) -> None:
        logger.exception(
            "jump-forward failed for request %s, which goes on token by token. "
            "Please report this with the lines below",
            request.request_id,
        )
        self._given_up.add(request)
        self.counters.errors += 1
        if self.failed:
            logger.error("jump-forward failed %d times and is switched off", MAX_ERRORS)

    @property
    def failed(self) -> bool:
        """Switched off by errors."""
        return self.counters.errors >= MAX_ERRORS

    def _drop_in_flight(self, request: Request) -> None:
        """Before forced tokens are appended: what the passes in flight compute of the tokens that
        are there stays, and what they sample is dropped when it arrives."""
        if request.num_in_flight_tokens:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            self.counters.stale_tokens += request.num_output_placeholders
            request.num_output_placeholders = 0

    def _append(self, request: Request, forced: list[int], output: EngineCoreOutput) -> None:
        """Stop conditions are checked token by token, as if each had been sampled."""
        num_before = request.num_output_tokens
        for token in forced:
            request.append_output_token_ids(token)
            if check_stop(request, self._scheduler.max_model_len):
                output.finish_reason = request.get_finished_reason()
                output.stop_reason = request.stop_reason
                break
        num_appended = request.num_output_tokens - num_before
        appended = forced[:num_appended]
        output.new_token_ids = [*output.new_token_ids, *appended]
        rows = output.new_logprobs
        if rows is not None:
            output.new_logprobs = joined(rows, rows_of_forced(appended, rows))
        self._note_jump(request, num_before, num_before + num_appended)

    def _note_jump(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) of the output were forced."""
        self.counters.jumps += 1
        self.counters.forced_tokens += end - start
        self._reports.add(request, start, end)
        if self._traces is not None:
            self._traces.jumped(request, end - start)

    # -- around a step's schedule -------------------------------------------------------------

    def rewrite_resumed(self, scheduler_output: SchedulerOutput) -> None:
        """Give the V1 runner all tokens of the jumped requests that run again in this step.

        From then on it counts the output of such a request from there.
        """
        scheduler = self._scheduler
        for data in scheduler_output.scheduled_new_reqs if self._jumped else ():
            request = scheduler.requests[data.req_id]
            if request not in self._jumped:
                continue
            self._jumped.discard(request)
            if scheduler.use_v2_model_runner:
                continue
            self._num_as_prompt[request] = request.num_output_tokens
            data.prompt_token_ids = list(request._all_token_ids)
            if data.sampling_params is not None and data.sampling_params.min_tokens:
                params = data.sampling_params = copy.copy(data.sampling_params)
                params.min_tokens = max(0, params.min_tokens - request.num_output_tokens)
        # Of who did not run in the step before, the runner takes so many last tokens as output.
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids) if cached.all_token_ids else ():
            if request_id in cached.all_token_ids:
                num_as_prompt = self._num_as_prompt.get(scheduler.requests[request_id], 0)
                cached.num_output_tokens[index] -= num_as_prompt

    def release_one_if_stuck(self, scheduler_output: SchedulerOutput) -> None:
        """If nothing could be scheduled, let the last waiting jumped request give up its blocks.

        So the engine always gets on. Nothing is scheduled only while nobody runs (who ran last has
        been preempted, and made room), or who runs awaits its last token, in flight: otherwise the
        blocks in use are those of waiting requests. Each such step gives back what one of them
        holds, so that after fewer steps than requests wait the first of them has room, alone in the
        cache if need be. Who was released keeps its tokens, and computes them again like one
        preempted.
        """
        scheduler = self._scheduler
        if scheduler_output.num_scheduled_tokens or scheduler.running or not self._jumped:
            return
        if scheduler.pause_state == PauseState.PAUSED_ALL:
            return
        for request_id in scheduler_output.preempted_req_ids or ():
            request = scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                return
        waiting = [r for r in scheduler.kv_holding_waiting if r in self._jumped]
        if waiting:
            self._release(waiting[-1])
            self.counters.released_when_stuck += 1

    def release_all(self) -> None:
        """Let every waiting jumped request give up its blocks (for a reset of the cache)."""
        for request in [r for r in self._scheduler.kv_holding_waiting if r in self._jumped]:
            self._release(request)

    def _release(self, request: Request) -> None:
        scheduler = self._scheduler
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        scheduler.reset_preempted_req_ids.add(request.request_id)
        scheduler.waiting.prepend_request(request)


def _put_before(output: EngineCoreOutput, opening: Opening) -> None:
    """Let the first output of a request begin with what was forced before its first pass."""
    output.new_token_ids = [*opening.tokens, *output.new_token_ids]
    rows = output.new_logprobs
    if rows is not None:
        sampled = rows if opening.last is None else rows_of_forced([opening.last], rows)
        output.new_logprobs = joined(rows_of_forced(opening.tokens, rows), sampled)
