"""Canaries through the engine core's own steps.

Owns how they become vLLM's requests, and that a run ends (`StepLimits`). Does not own which run and
what is compared (`stages.py`), or what a run that fails leaves behind (`engine_state.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.self_check.canaries import Canary
from sgl_vllm.self_check.comparison import Answer, Row
from sgl_vllm.self_check.engine_state import has_work
from sgl_vllm.self_check.language import ListedGrammar, TokenTable

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

logger = init_logger("vllm.sgl_vllm.self_check")

ID_PREFIX = "sgl_vllm-self-check-"
NUM_LIKELIEST = 5
"""Each token comes with the log-probabilities of this many candidates, which show a tie."""


class RunFailed(Exception):
    """A run of canaries did not finish: a step raised an exception, or no step made progress."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """When a run of canaries counts as hanging.

    Attributes:
        run_s: one run.
        stalled_s: steps in which the model does not run, while requests wait.
        all_s: all runs together. vLLM gives an engine 600 s to start.
    """

    run_s: float = 120.0
    stalled_s: float = 30.0
    all_s: float = 300.0


class Driver:
    """Runs canaries on an engine core that serves nothing else meanwhile. Records which tokens are
    forced, as a `JumpListener`.

    Attributes:
        limits: when a run counts as hanging.
        table: of the tokenizer; None if the engine has none. Then there are no structured canaries.
        num_passes: forward passes so far.
    """

    def __init__(self, engine: EngineCore, limits: StepLimits | None) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self.limits = limits or StepLimits()
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
                    canaries[waiting[0]].after_steps <= num_steps or not has_work(self._engine)
                ):
                    number = waiting.pop(0)
                    told = forced[number] if forced else {}
                    request = self._request(canaries[number], reference, told, rows)
                    sent[request.request_id] = canaries[number], request, answers[number]
                    self._scheduler.add_request(request)
                if not has_work(self._engine):
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

    def _require_time(self, started: float, last_pass: float) -> None:
        """
        Raises:
            RunFailed: a run takes too long.
        """
        now, limits = time.monotonic(), self.limits
        if now - started > limits.run_s:
            raise RunFailed(f"not done after {limits.run_s:g} s")
        if now - last_pass > limits.stalled_s:
            raise RunFailed(f"nothing ran for {limits.stalled_s:g} s")
        if now - self._begun > limits.all_s:
            raise RunFailed(f"the whole check takes more than {limits.all_s:g} s")

    def jumped(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) of the output of `request` were forced, jumped over or not."""
        self._forced.setdefault(request.request_id, []).extend(range(start, end))

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
