"""How a jumped request runs again.

Owns what vLLM's runners need to know about resumed requests, and the release of blocks when jumped
requests block each other. Does not own the jump itself (`jump.py`).

vLLM schedules `kv_holding_waiting` before anything else, and resumes its requests like a streaming
session that got more input. The V1 runner must then be given all their tokens as the prompt; the V2
runner gets the output from vLLM. vLLM cannot preempt requests that hold blocks while they wait, so
a step that could schedule nothing must release one of them.
"""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary, WeakSet

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.jump.connectors import UnseenJumps
from sgl_vllm.jump.counters import JumpCounters


class JumpedRequests:
    """The requests that have jumped and not run since.

    Args:
        connector: hides jumps from the scheduler's KV connector, if it has one.
    """

    def __init__(
        self, scheduler: Scheduler, counters: JumpCounters, connector: UnseenJumps | None = None
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._waiting: WeakSet[Request] = WeakSet()
        self._in_runner: WeakSet[Request] = WeakSet()
        """Those for which the V2 runner keeps a slot: all but the opened and the released ones."""
        self._num_as_prompt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """How many output tokens of a request the V1 runner treats as part of its prompt."""
        self.connector = connector

    def add(self, request: Request) -> None:
        """A running request has jumped, and waits with its blocks."""
        self._waiting.add(request)
        self._in_runner.add(request)
        if self.connector is not None:
            self.connector.jumped(request)

    def add_opened(self, request: Request) -> None:
        """Forced tokens follow the prompt of a request that has never run."""
        self._waiting.add(request)
        if self.connector is not None:
            self.connector.opened(request)

    def may_be_scheduled(self, request: Request) -> bool:
        """Whether a request that vLLM has found ready can run in this step.

        A KV connector learns that a request was preempted one step before it is asked about the
        request again. vLLM itself admits no waiting request in a step that preempts.
        """
        scheduler = self._scheduler
        if self._lacks_slot(request):
            return False
        if self.connector is None:
            return True
        if request.status == RequestStatus.PREEMPTED and request in self._waiting:
            # Loaded again after it released its blocks. The runner does not have all its tokens.
            request.status = RequestStatus.WAITING
        return request.request_id not in scheduler.reset_preempted_req_ids

    def _lacks_slot(self, request: Request) -> bool:
        """Whether the V2 runner has no slot for a request that it does not know. It keeps those of
        jumped requests while they wait, which vLLM does not count as running. Some of them may have
        to wait longer than a request behind them, for a LoRA adapter or behind a load."""
        scheduler = self._scheduler
        if not scheduler.use_v2_model_runner or request in self._in_runner:
            return False
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        if len(self._in_runner) < room:
            return False
        num_kept = sum(
            one.status == RequestStatus.WAITING and scheduler.requests.get(one.request_id) is one
            for one in self._in_runner
        )
        return num_kept >= room

    def drop_drafts(self) -> None:
        """Drop what a drafter has proposed for them before they jumped."""
        for request in self._waiting:
            request.spec_token_ids = []

    def rewrite_resumed(self, scheduler_output: SchedulerOutput) -> None:
        """Give the V1 runner all tokens of the jumped requests that run again in this step.

        From then on it counts the output of such a request from there.
        """
        scheduler = self._scheduler
        for data in scheduler_output.scheduled_new_reqs if self._waiting else ():
            request = scheduler.requests[data.req_id]
            if request not in self._waiting:
                continue
            self._waiting.discard(request)
            self._in_runner.discard(request)
            if scheduler.use_v2_model_runner:
                continue
            self._num_as_prompt[request] = request.num_output_tokens
            data.prompt_token_ids = list(request._all_token_ids)
            # vLLM leaves out the pixels of images that are computed. The runner keeps what it gets
            # here, and needs them if the request is preempted later.
            data.mm_features = request.mm_features
            if data.sampling_params is not None and data.sampling_params.min_tokens:
                params = data.sampling_params = copy.copy(data.sampling_params)
                params.min_tokens = max(0, params.min_tokens - request.num_output_tokens)
        # The runner takes the last `num_output_tokens` of all tokens as the output of a request
        # that did not run in the step before. Of one that did, it forgets what it has beyond them:
        # drafts that it assumed to be accepted.
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids) if self._num_as_prompt else ():
            num_as_prompt = self._num_as_prompt.get(scheduler.requests[request_id], 0)
            cached.num_output_tokens[index] -= num_as_prompt

    def release_one_if_stuck(self, scheduler_output: SchedulerOutput) -> None:
        """Release the blocks of the last waiting jumped request if nothing could be scheduled.

        This guarantees progress. Nothing is scheduled and nothing runs only if waiting requests
        hold the blocks (or if the last running request was just preempted, which made room). Each
        such step releases one request, so after fewer steps than requests wait, the first one has
        room, alone in the cache if need be. A released request keeps its tokens and computes them
        again, like a preempted one.
        """
        scheduler = self._scheduler
        if scheduler_output.num_scheduled_tokens or scheduler.running or not self._waiting:
            return
        if scheduler.pause_state == PauseState.PAUSED_ALL:
            return
        if self.connector is not None and (
            scheduler_output.preempted_req_ids or self._is_loading()
        ):
            return  # a released request may run in the next step; a load will end
        for request_id in scheduler_output.preempted_req_ids or ():
            request = scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                return
        if holding := self._holding_blocks():
            self._release(holding[-1])
            self._counters.released_when_stuck += 1

    def release_all(self) -> None:
        """Release the blocks of all waiting jumped requests, to reset the cache."""
        for request in self._holding_blocks():
            self._release(request)

    def _holding_blocks(self) -> list[Request]:
        """Without those whose blocks a KV connector is writing."""
        return [
            one
            for one in self._scheduler.kv_holding_waiting
            if one in self._waiting and one.status == RequestStatus.WAITING
        ]

    def _is_loading(self) -> bool:
        return any(
            one.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for one in self._scheduler.kv_holding_waiting
        )

    def _release(self, request: Request) -> None:
        scheduler = self._scheduler
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler._free_request_blocks(request)
        self._in_runner.discard(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        scheduler.reset_preempted_req_ids.add(request.request_id)
        if self.connector is not None:
            self.connector.released(request)
        scheduler.waiting.prepend_request(request)
