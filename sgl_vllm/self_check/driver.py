"""Canaries through the engine core's own steps.

Owns how they become vLLM's requests, that a run ends (`StepLimits`), and that the engine is idle
afterwards, whatever happens. Does not own which canaries run or what is compared (`stages.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.self_check.canaries import Canary
from sgl_vllm.self_check.comparison import Answer, Row
from sgl_vllm.self_check.engine_state import end_steps, take_out
from sgl_vllm.self_check.grammar import ListedGrammar
from sgl_vllm.self_check.language import TokenTable

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


@dataclass(frozen=True, slots=True)
class Text:
    """What structured canaries need of the tokenizer.

    Attributes:
        end_token: ends a text.
    """

    table: TokenTable
    end_token: int


class JumpRecorder:
    """Records which tokens of which canary were forced (`JumpListener`), jumped over or not."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, int]]] = {}

    def jumped(self, request: Request, start: int, end: int) -> None:
        if start < end:
            self.runs.setdefault(request.request_id, []).append((start, end))


class Driver:
    """Runs canaries on an engine core that serves nothing else meanwhile.

    Args:
        text: None if the engine has no tokenizer; then there are no structured canaries.
        limits: when a run counts as hanging.
    """

    def __init__(
        self, engine: EngineCore, text: Text | None, limits: StepLimits | None = None
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._limits = limits or StepLimits()
        self._num_sent = 0
        self._begun = time.monotonic()
        self.text = text
        self.recorder = JumpRecorder()
        self.num_steps = 0

    # -- runs -------------------------------------------------------------------------------------

    def run(
        self,
        canaries: Sequence[Canary],
        *,
        reference: bool = False,
        forced: Sequence[Mapping[int, int]] = (),
        rows: bool = True,
    ) -> list[Answer]:
        """The answers to `canaries`, in their order. The engine is idle afterwards.

        Args:
            reference: formats are enforced by `ListedGrammar`, not by what is under test.
            forced: with `reference`, for each canary the tokens that it must choose.
            rows: ask for log-probabilities.

        Raises:
            RunFailed: names what happened.
        """
        self.recorder.runs.clear()
        answers = [Answer() for _ in canaries]
        requests: dict[str, tuple[Request, Answer]] = {}
        waiting = sorted(range(len(canaries)), key=lambda one: canaries[one].after_steps)
        started = last_pass = time.monotonic()
        num_steps = 0
        try:
            while waiting or self._has_work():
                while waiting and (
                    canaries[waiting[0]].after_steps <= num_steps or not self._has_work()
                ):
                    number = waiting.pop(0)
                    told = forced[number] if forced else {}
                    request = self._request(canaries[number], reference, told, rows)
                    requests[request.request_id] = (request, answers[number])
                    self._scheduler.add_request(request)
                outputs, has_run = self._step()
                num_steps += 1
                now = time.monotonic()
                if has_run:
                    last_pass = now
                else:
                    time.sleep(0.0005)
                for output in outputs:
                    if output.request_id in requests:
                        _add(output, *requests[output.request_id])
                if now - started > self._limits.run_s:
                    raise RunFailed(f"not done after {self._limits.run_s:g} s")
                if now - last_pass > self._limits.stalled_s:
                    raise RunFailed(f"nothing ran for {self._limits.stalled_s:g} s")
                if now - self._begun > self._limits.all_s:
                    raise RunFailed(f"the whole check takes more than {self._limits.all_s:g} s")
        except RunFailed:
            self.stop(request for request, _ in requests.values())
            raise
        except Exception as error:
            logger.exception("sgl-vllm: the self-check's requests failed")
            self.stop(request for request, _ in requests.values())
            raise RunFailed(f"{type(error).__name__}: {error}"[:300]) from error
        for request_id, (request, answer) in requests.items():
            answer.num_preemptions = request.num_preemptions
            answer.forced = self.recorder.runs.get(request_id, [])
        for canary, answer in zip(canaries, answers, strict=True):
            if canary.scores_from is not None and not canary.by_select:  # vLLM scores all
                answer.scores = answer.scores[canary.scores_from - 1 :]
        return answers

    def stop(self, requests: Iterable[Request]) -> None:
        """Take a run that has failed out of the engine, whatever state it is in."""
        requests = [*requests]
        with contextlib.suppress(Exception):
            self._engine.abort_requests([request.request_id for request in requests])
        take_out(self._scheduler, requests)
        deadline = time.monotonic() + self._limits.stalled_s
        while self._has_work() and time.monotonic() < deadline:
            try:
                self._step()
            except Exception:
                logger.debug("a step after a failed run failed, too", exc_info=True)
                if self._engine.batch_queue:
                    self._engine.batch_queue.clear()
                with contextlib.suppress(Exception):  # what a pass waits for that was not sampled
                    self._engine.model_executor.sample_tokens(None)
        end_steps(self._scheduler)

    def empty_cache(self) -> None:
        """Empty the prefix cache. Only at idle.

        Raises:
            RunFailed: a block is still in use.
        """
        if not self._scheduler.reset_prefix_cache():
            raise RunFailed("the prefix cache cannot be emptied: blocks are still in use")

    @property
    def can_chunk(self) -> bool:
        """Whether a prompt may take several steps."""
        return bool(self._engine.vllm_config.scheduler_config.enable_chunked_prefill)

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

    # -- a step -----------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return self._scheduler.has_requests() or bool(self._engine.batch_queue)

    def _step(self) -> tuple[list[EngineCoreOutput], bool]:
        results, has_run = self._engine.step_fn()
        self._engine.post_step(has_run)
        self.num_steps += has_run
        return [output for one in (results or {}).values() for output in one.outputs], has_run

    # -- requests ---------------------------------------------------------------------------------

    def _request(
        self, canary: Canary, reference: bool, forced: Mapping[int, int], rows: bool
    ) -> Request:
        self._num_sent += 1
        params = self._params(canary, rows)
        request = EngineCoreRequest(
            request_id=f"{ID_PREFIX}{self._num_sent}",
            prompt_token_ids=list(canary.prompt),
            mm_features=None,
            sampling_params=params,
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
        assert self.text is not None and made.structured_output_request is not None
        made.structured_output_request.grammar = ListedGrammar(
            canary.language, self.text.table, {self.text.end_token}, forced
        )
        return made

    def _params(self, canary: Canary, rows: bool) -> SamplingParams:
        constraint = None
        if canary.language is not None:
            constraint = StructuredOutputsParams(regex=canary.language.regex)
            constraint._backend = "xgrammar"  # as vLLM's frontend does; ours is in place already
        asks_select = canary.by_select and canary.scores_from is not None
        params = SamplingParams(
            temperature=0,
            seed=0,  # greedy requests need none, but without one vLLM's V2 runner draws a number
            max_tokens=canary.max_tokens,
            ignore_eos=canary.language is None,
            logprobs=NUM_LIKELIEST if rows and canary.scores_from is None else None,
            prompt_logprobs=None if canary.scores_from is None else 0,
            extra_args={SCORE_FROM: canary.scores_from} if asks_select else None,
            structured_outputs=constraint,
            skip_reading_prefix_cache=not canary.reads_cache or None,
            output_kind=RequestOutputKind.FINAL_ONLY,  # not a stream: a jump may end its text
        )
        params.update_from_generation_config({}, self.text.end_token if self.text else None)
        return params


def _add(output: EngineCoreOutput, request: Request, answer: Answer) -> None:
    answer.tokens += output.new_token_ids
    if output.new_logprobs is not None:
        answer.rows += _rows(output.new_logprobs)
    if output.new_prompt_logprobs_tensors is not None:
        answer.scores += _rows(output.new_prompt_logprobs_tensors)
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
