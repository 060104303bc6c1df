"""Runs canaries through the engine core's own steps, while the engine serves nothing else.

Owns how canaries become vLLM requests, the time limits of a run, and the cleanup: a canary appears
in no metric or event, and leaves nothing in the engine. Does not own which canaries run or what is
compared (`check.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
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
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.scheduler.assembly import Parts, renew
from sgl_vllm.self_check.canaries import Canary
from sgl_vllm.self_check.language import ListedGrammar, TokenTable
from sgl_vllm.self_check.report import Answer, Row

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

logger = init_logger("vllm.sgl_vllm.self_check")

ID_PREFIX = "sgl_vllm-self-check-"
NUM_LIKELIEST = 5
"""Each token comes with the log-probabilities of this many candidates, which show a tie."""


class RunFailed(Exception):
    """A run of canaries did not finish: a step raised an exception, or no step made progress."""


# When a run counts as hanging. vLLM gives an engine 600 s to start.
RUN_S = 120.0
STALLED_S = 30.0
"""Of steps in which the model does not run, while requests wait."""
ALL_S = 300.0
"""All runs together."""


class Driver:
    """Runs canaries on an engine core that serves nothing else meanwhile. Records which tokens are
    forced.

    Attributes:
        table: of the tokenizer; None if the engine has none. Then there are no structured canaries.
        num_passes: forward passes so far.
    """

    def __init__(self, engine: EngineCore, parts: Parts) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._parts = parts
        self._num_sent = 0
        self._begun = time.monotonic()
        self._forced: dict[str, list[int]] = {}
        self.table: TokenTable | None = None
        self.num_passes = 0

    def run(
        self,
        canaries: Sequence[Canary],
        *,
        reference: bool = False,
        forced: Sequence[Mapping[int, int]] = (),
        rows: bool = True,
    ) -> list[Answer]:
        """The answers to `canaries`, in their order. Unless it fails, the engine is idle then.

        Args:
            reference: formats are enforced by `ListedGrammar`, not by what is under test.
            forced: with `reference`, for each canary the tokens that it must choose.
            rows: ask for log-probabilities.

        Raises:
            RunFailed: names what happened.
        """
        self._forced.clear()
        answers = [Answer() for _ in canaries]
        sent: dict[str, tuple[Canary, Request, Answer]] = {}
        waiting = sorted(range(len(canaries)), key=lambda one: canaries[one].after_steps)
        started = last_pass = time.monotonic()
        try:
            for num_steps in itertools.count():
                while waiting and (
                    canaries[waiting[0]].after_steps <= num_steps or not self._is_busy()
                ):
                    number = waiting.pop(0)
                    told = forced[number] if forced else {}
                    request = self._request(canaries[number], reference, told, rows)
                    sent[request.request_id] = canaries[number], request, answers[number]
                    self._scheduler.add_request(request)
                if not self._is_busy():
                    break
                results, has_run = self._engine.step_fn()
                self._engine.post_step(has_run)
                self.num_passes += has_run
                for output in (one for many in (results or {}).values() for one in many.outputs):
                    if output.request_id in sent:
                        _add(output, sent[output.request_id][2])
                if has_run:
                    last_pass = time.monotonic()
                else:
                    time.sleep(0.0005)
                self._require_time(started, last_pass)
        except RunFailed:
            raise
        except Exception as error:
            logger.exception("sgl-vllm: the self-check's requests failed")
            raise RunFailed(f"{type(error).__name__}: {error}"[:300]) from error
        for canary, request, answer in sent.values():
            answer.num_preemptions = request.num_preemptions
            places = self._forced.get(request.request_id, ())
            answer.forced = [place for place in places if place < len(answer.tokens)]
            if canary.scores_from is not None:
                skipped = 0 if canary.by_select else canary.scores_from - 1  # vLLM scores all
                answer.rows = answer.rows[skipped:]
                answer.tokens = [*(next(iter(row)) for row in answer.rows), *answer.tokens]
        return answers

    def _is_busy(self) -> bool:
        return self._scheduler.has_requests() or bool(self._engine.batch_queue)

    def _require_time(self, started: float, last_pass: float) -> None:
        """
        Raises:
            RunFailed: a run takes too long.
        """
        now = time.monotonic()
        if now - started > RUN_S:
            raise RunFailed(f"not done after {RUN_S:g} s")
        if now - last_pass > STALLED_S:
            raise RunFailed(f"nothing ran for {STALLED_S:g} s")
        if now - self._begun > ALL_S:
            raise RunFailed(f"the whole check takes more than {ALL_S:g} s")

    def forced(self, request: Request, start: int, end: int, *, is_jump: bool) -> None:
        """Tokens [start, end) of the output of `request` are forced."""
        self._forced.setdefault(request.request_id, []).extend(range(start, end))

    @contextlib.contextmanager
    def recording_jumps(self) -> Iterator[None]:
        """While inside, answers have their forced tokens."""
        if (jump := self._parts.jump) is not None:
            jump.listeners.append(self.forced)
        try:
            yield
        finally:
            if jump is not None:
                jump.listeners.remove(self.forced)

    # -- conditions of a run ----------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Empty the prefix cache. Only at idle.

        Raises:
            RunFailed: a block is still in use.
        """
        if not self._scheduler.reset_prefix_cache():
            raise RunFailed("the prefix cache cannot be emptied: blocks are still in use")

    @contextlib.contextmanager
    def little_room(self, num_blocks: int) -> Iterator[None]:
        """While inside, so few blocks of the cache are free that requests are preempted."""
        pool = self._scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - num_blocks))
        try:
            yield
        finally:
            pool.free_blocks(held)

    @contextlib.contextmanager
    def small_steps(self, num_tokens: int) -> Iterator[None]:
        """While inside, a step computes at most so many tokens, so that prompts come in chunks."""
        scheduler = self._scheduler
        usual = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(usual, max(num_tokens, 1))
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = usual

    # -- the engine around a check ----------------------------------------------------------------

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """While inside, nothing that the engine does can be seen outside it. Only at idle.

        Afterwards the random generators of this process have their old state (those of
        workers are not used: canaries are greedy and have a seed), and structured output its old
        backend, which vLLM would choose for the first structured request.
        """
        scheduler, manager = self._scheduler, self._engine.structured_output_manager
        connector, publisher = scheduler.connector, scheduler.kv_event_publisher
        backend = manager.backend
        of_python, of_numpy = random.getstate(), np.random.get_state()
        of_torch = torch.get_rng_state()
        if connector is not None:
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

    def idle_problem(self) -> str | None:
        """What an engine that has answered every request has kept; None if nothing."""
        scheduler, radix = self._scheduler, self._parts.radix
        if scheduler.requests or scheduler.running or scheduler.waiting:
            return f"{len(scheduler.requests)} requests are left"
        pool = scheduler.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is never used
        if num_used:
            return f"{num_used} blocks of the cache are not free"
        if radix is not None and radix.tree is not None:
            try:
                check_pool(radix.pool)
            except AssertionError as error:
                return f"the radix tree and the blocks disagree ({error})"
        return None

    def take_out_requests(self) -> None:
        """Remove the requests of a run that has failed, and let its steps end. A fault may have
        left requests in any queue, known to the scheduler or not, ended or not."""
        engine, scheduler = self._engine, self._scheduler
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
        deadline = time.monotonic() + STALLED_S
        while self._is_busy() and time.monotonic() < deadline:
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

    def free_blocks(self) -> None:
        """Free what a part that is switched off still holds. Only without requests."""
        pool = self._scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            if block.ref_cnt > 0 and not block.is_null:
                block.ref_cnt = 1
                pool.free_blocks([block])

    def forget_canaries(self) -> None:
        """Empty the cache, and set all counters back to zero.

        Raises:
            RunFailed: the cache holds what canaries have computed, and cannot be emptied.
        """
        self.empty_cache()
        self._scheduler.make_stats()  # what the next report would count is taken out, and dropped
        if hasattr(self._engine, "_iteration_index"):
            self._engine._iteration_index = 0
        renew(self._parts)

    # -- requests ---------------------------------------------------------------------------------

    def _request(
        self, canary: Canary, reference: bool, forced: Mapping[int, int], rows: bool
    ) -> Request:
        self._num_sent += 1
        request = EngineCoreRequest(
            request_id=f"{ID_PREFIX}{self._num_sent}",
            prompt_token_ids=list(canary.prompt),
            mm_features=None,
            sampling_params=self._params(canary, rows),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            reasoning_ended=True,
        )
        if canary.language is None or not reference:
            return self._engine.preprocess_add_request(request)[0]
        made = Request.from_engine_core_request(request, self._engine.request_block_hasher)
        assert self.table is not None and made.structured_output_request is not None
        grammar = ListedGrammar(canary.language, self.table, forced)
        made.structured_output_request.grammar = grammar
        return made

    def _params(self, canary: Canary, rows: bool) -> SamplingParams:
        constraint = None
        if canary.language is not None:
            constraint = StructuredOutputsParams(regex=canary.language.regex)
            constraint._backend = "xgrammar"  # as vLLM's frontend does; ours is in place already
        params = SamplingParams(
            temperature=0,
            seed=0,  # greedy requests need none, but without one vLLM's V2 runner draws a number
            max_tokens=canary.max_tokens,
            ignore_eos=canary.language is None,
            logprobs=NUM_LIKELIEST if rows and canary.scores_from is None else None,
            prompt_logprobs=None if canary.scores_from is None else 0,
            extra_args={SCORE_FROM: canary.scores_from} if canary.by_select else None,
            structured_outputs=constraint,
            skip_reading_prefix_cache=not canary.reads_cache or None,
            output_kind=RequestOutputKind.FINAL_ONLY,  # not a stream: a jump may end its text
        )
        params.update_from_generation_config({}, self.table.end if self.table else None)
        return params


def _add(output: EngineCoreOutput, answer: Answer) -> None:
    answer.tokens += output.new_token_ids
    for logprobs in (output.new_prompt_logprobs_tensors, output.new_logprobs):
        if logprobs is not None:
            answer.rows += _rows(logprobs)
    if output.prefill_stats is not None:
        answer.num_cached_tokens = output.prefill_stats.num_cached_tokens
    if output.finish_reason is not None:
        answer.finish_reason = output.finish_reason.name.lower()


def _rows(logprobs: LogprobsLists | LogprobsTensors) -> list[Row]:
    """One row for each position; the chosen token is the first of its row."""
    return [
        dict(zip(tokens, values, strict=True)) | {tokens[0]: values[0]}
        for tokens, values in zip(
            logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist(), strict=True
        )
    ]


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
