"""What a jump does to a request: forced tokens are appended, the KV is kept, one pass computes all.

Owns: which requests may jump, and moving one so that vLLM resumes it with its blocks. Does not own
what is forced (`fsm/backend.py`).

    step n     samples token t                       KV of [0, t) computed
    jump       appends forced f1 .. fk               request leaves `running` for
                                                     `kv_holding_waiting`, blocks and all
    step n+1   computes t, f1 .. fk in one pass, samples the next undecided token

vLLM drains `kv_holding_waiting` before anything else and resumes its requests like a streaming
session that got more input. On the V1 runner they must then carry all their tokens as the prompt
(`rewrite_resumed`). Requests that hold blocks while they wait cannot be preempted by vLLM, so a
step that could schedule nothing must release one (`release_one_if_stuck`).

Idea: jump-forward decoding of the compressed finite state machine (arXiv 2312.07104, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.fsm.backend import ForcedTokens

logger = init_logger("vllm.sgl_vllm.jump")

MAX_ERRORS = 8
"""So many unexpected errors switch jump-forward off."""


@dataclass(slots=True)
class JumpCounters:
    """Counts since start."""

    jumps: int = 0
    forced_tokens: int = 0
    released_when_stuck: int = 0
    errors: int = 0


class JumpForward:
    """Jumps the requests of one scheduler. Stateless but for who has jumped and not run again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._forced = ForcedTokens(scheduler.structured_output_manager)
        self._given_up: WeakSet[Request] = WeakSet()
        self._jumped: WeakSet[Request] = WeakSet()
        self.counters = JumpCounters()

    def after_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Append what is forced to every request that has just got a token."""
        scheduler = self._scheduler
        left: set[Request] = set()
        for output in outputs:
            if output.finish_reason is not None or not output.new_token_ids:
                continue
            request = scheduler.requests.get(output.request_id)
            if request is None or not may_jump(request):
                continue
            forced = self._take(request)
            if forced:
                self._append(request, forced, output)
                left.add(request)
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
            logger.exception(
                "jump-forward failed for request %s, which goes on token by token. "
                "Please report this with the lines below",
                request.request_id,
            )
            self._given_up.add(request)
            self.counters.errors += 1
            if self.failed:
                logger.error("jump-forward failed %d times and is switched off", MAX_ERRORS)
            return []

    @property
    def failed(self) -> bool:
        """Switched off by errors."""
        return self.counters.errors >= MAX_ERRORS

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
        output.new_token_ids = [*output.new_token_ids, *forced[:num_appended]]
        self.counters.jumps += 1
        self.counters.forced_tokens += num_appended

    def rewrite_resumed(self, scheduler_output: SchedulerOutput) -> None:
        """Give the runner all tokens of the jumped requests that run again in this step."""
        if not self._jumped:
            return
        for data in scheduler_output.scheduled_new_reqs:
            request = self._scheduler.requests[data.req_id]
            if request in self._jumped:
                data.prompt_token_ids = list(request._all_token_ids)
                self._jumped.discard(request)

    def release_one_if_stuck(self, scheduler_output: SchedulerOutput) -> None:
        """If nothing could be scheduled, let the last waiting jumped request give up its blocks."""
        if scheduler_output.num_scheduled_tokens or not self._jumped:
            return
        waiting = [r for r in self._scheduler.kv_holding_waiting if r in self._jumped]
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


def may_jump(request: Request) -> bool:
    """Whether a jump leaves what `request` gets exactly as it would be without.

    On the V1 runner a resumed request's earlier output counts as prompt and its generator starts
    anew, so everything that looks at the output, or draws from a seed, is decoded token by token.
    So is what changes which token is picked among the legal ones, and what wants a row of
    log-probabilities for each token.
    """
    params = request.sampling_params
    if params is None or not request.use_structured_output:
        return False
    return not (
        request.mm_features
        or request.resumable
        or request.prompt_token_ids is None
        or params.num_logprobs is not None
        or params.prompt_logprobs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.bad_words
        or params.logit_bias
        or params.allowed_token_ids
        or (params.seed is not None and params.temperature > 0)
    )
