"""What is checked of each part. Each stage adds one part, so a fault belongs to the last one added.

Owns which canaries run, with which parts on, and what they are compared with.

    stage          parts on                     compared with
    noise          radix, fsm, without hits     the same requests in another order
    radix          radix                        the same prompts, computed from the first token on
    fsm            radix, fsm                   the same formats, by listing their texts
    jump_forward   radix, fsm, jump_forward     the same tokens decoded one by one, jumps off
    select         all                          the same scores, by vLLM

A part that has failed its stage is off in those that follow. Each stage begins with an empty cache:
what a request computes is cached, even if the request does not read the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from sgl_vllm.self_check import canaries as make
from sgl_vllm.self_check.canaries import Canary, Shape
from sgl_vllm.self_check.comparison import Agreement, Answer, compare, tolerance_of
from sgl_vllm.self_check.driver import Driver, RunFailed
from sgl_vllm.self_check.language import forced_tokens, why_not_forced, why_not_in

SLOWER = 1.1
"""A part is reported as slower if it takes more than this many times as long as vLLM without it."""


class Switches(Protocol):
    """Turns parts off for a while, at idle."""

    def without(self, *parts: str) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class StageResult:
    """What one stage has found.

    Attributes:
        agreement: the comparisons; their problems are the reason to switch the part off.
        with_s, without_s: seconds for the same requests with the part and without; 0 if not timed.
        notes: what the requests have reached, such as hits or preemptions.
    """

    part: str
    agreement: Agreement = field(default_factory=Agreement)
    with_s: float = 0.0
    without_s: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        return self.agreement.problems

    @property
    def is_slower(self) -> bool:
        return self.without_s > 0 and self.with_s > SLOWER * self.without_s


class Stages:
    """The stages on one engine.

    Args:
        dtype: the model's, such as "bfloat16".
        has_logprobs: whether log-probabilities and jumps can be asked for together.
        rounds: how often each stage runs its requests.
    """

    def __init__(
        self,
        driver: Driver,
        shape: Shape,
        switches: Switches,
        *,
        dtype: str,
        has_logprobs: bool,
        rounds: int = 1,
    ) -> None:
        self._driver = driver
        self._shape = shape
        self._switches = switches
        self._dtype = dtype
        self._has_logprobs = has_logprobs
        self._rounds = rounds
        self._cold: list[Answer] = []
        self._cold_s = 0.0
        self.noise = 0.0

    @property
    def tolerance(self) -> float:
        return tolerance_of(self._dtype, self.noise)

    def run(self, part: str, result: StageResult) -> None:
        """Run the stage of a part, and add to `result` what it finds.

        Raises:
            RunFailed: a run did not finish.
        """
        stage = {
            "radix": self._radix,
            "fsm": self._fsm,
            "jump_forward": self._jump_forward,
            "select": self._select,
        }[part]
        for _ in range(self._rounds):
            if not result.problems:
                self._driver.empty_cache()
                stage(result)

    # -- radix ------------------------------------------------------------------------------------

    def measure_noise(self) -> None:
        """How much the answers of two batches without cache hits differ.

        Raises:
            RunFailed: their answers cannot be compared, so no part can be checked.
        """
        plain = make.cold(make.hits(self._shape))
        with self._switches.without("jump_forward", "select"):
            self._cold = self._driver.run(plain)
            again, self._cold_s = self._timed(plain[::-1])
        found = Agreement()
        compare(again[::-1], self._cold, float("inf"), found)
        if found.problems:
            raise RunFailed(f"two runs of the same requests differ: {found.problems[0]}")
        self.noise = found.largest

    def _radix(self, result: StageResult) -> None:
        """Hits inside a block, several in a step; and preempted requests that are resumed."""
        hits = make.hits(self._shape)
        with self._switches.without("jump_forward", "select"):
            self._driver.run(make.prefixes(self._shape))
            got, result.with_s = self._timed(hits)
            self._compare(got, self._cold, result)
            tight = got
            if self._shape.can_be_tight:
                with self._driver.little_room(2 * make.NUM_PREFIXES + len(hits) + 1):
                    tight = self._driver.run(make.at_once(hits))
                self._compare(tight, self._cold, result)
            result.without_s = self._cold_s
            self._time_again(result, hits, make.cold(hits))
        self._note_hits(got, result)
        result.notes["preemptions"] = _num_preemptions(tight)

    # -- fsm and jump_forward ---------------------------------------------------------------------

    def _fsm(self, result: StageResult) -> None:
        """Masks of several formats in one batch. Jumps are off."""
        asked = make.structured(self._shape)
        with self._switches.without("jump_forward", "select"):
            got = self._driver.run(asked)
            result.problems.extend(self._wrong_texts(asked, got))
            if not result.problems:
                self._compare(got, self._driver.run(asked, reference=True), result)

    def _jump_forward(self, result: StageResult) -> None:
        """Jumps beside requests that decode, with room and without."""
        asked = make.structured(self._shape)
        num_prompt_blocks = sum(-(-len(one.prompt) // self._shape.block_size) for one in asked)
        with self._switches.without("select"):
            got, result.with_s = self._timed(asked, rows=self._has_logprobs)
            tight = got
            if self._shape.can_be_tight:
                with self._driver.little_room(num_prompt_blocks + 1):
                    tight = self._driver.run(make.at_once(asked), rows=self._has_logprobs)
            for one in (got, tight):
                result.problems.extend(self._wrong_texts(asked, one))
                result.problems.extend(self._wrongly_forced(asked, one))
            if result.problems:
                return
            with self._switches.without("jump_forward"):
                want = self._one_by_one(asked, got)
                self._compare(got, want, result)
                if [one.tokens for one in tight] != [one.tokens for one in got]:
                    want = self._one_by_one(asked, tight)
                self._compare(tight, want, result)
                _, result.without_s = self._timed(asked, rows=self._has_logprobs)
            self._time_again(result, asked, asked, "jump_forward")
        result.notes["forced_tokens"] = sum(b - a for answer in got for a, b in answer.forced)
        result.notes["preemptions"] = _num_preemptions(tight)

    def _one_by_one(self, asked: Sequence[Canary], got: Sequence[Answer]) -> list[Answer]:
        """The same forced tokens, each decoded in its own pass, after prompts that are computed
        again."""
        self._driver.empty_cache()
        forced = [forced_tokens(answer.tokens, answer.forced) for answer in got]
        return self._driver.run(make.cold(asked), reference=True, forced=forced)

    def _wrong_texts(self, asked: Sequence[Canary], got: Sequence[Answer]) -> Iterator[str]:
        text = self._driver.text
        assert text is not None
        for number, (canary, answer) in enumerate(zip(asked, got, strict=True)):
            if canary.language is None or answer.finish_reason == "length":
                continue
            if answer.finish_reason != "stop":
                yield f"request {number} ended by {answer.finish_reason or 'nothing'}"
            elif why := why_not_in(canary.language, text.table, {text.end_token}, answer.tokens):
                yield f"request {number}: {why}"

    def _wrongly_forced(self, asked: Sequence[Canary], got: Sequence[Answer]) -> Iterator[str]:
        text = self._driver.text
        assert text is not None
        for number, (canary, answer) in enumerate(zip(asked, got, strict=True)):
            if canary.language is not None and (
                why := why_not_forced(
                    canary.language, text.table, {text.end_token}, answer.tokens, answer.forced
                )
            ):
                yield f"request {number}: {why}"

    # -- select -----------------------------------------------------------------------------------

    def _select(self, result: StageResult) -> None:
        """Scores of choices: with nothing cached, with the prefix cached, and in chunks."""
        whole = make.scored(self._shape, 400)
        by_select = make.selected(whole)
        with self._switches.without("jump_forward"):
            want, result.without_s = self._timed(whole)
            self._driver.empty_cache()
            self._compare(self._driver.run(by_select), want, result)
            cached, result.with_s = self._timed(by_select)
            self._compare(cached, want, result)
            if self._driver.can_chunk:
                self._driver.empty_cache()
                with self._driver.small_steps(self._shape.block_size + 5):
                    in_chunks = self._driver.run(by_select)
                self._compare(in_chunks, want, result)
            self._time_again(result, by_select, whole)
        self._note_hits(cached, result)

    # -- all --------------------------------------------------------------------------------------

    def _compare(self, got: Sequence[Answer], want: Sequence[Answer], result: StageResult) -> None:
        compare(got, want, self.tolerance, result.agreement)

    def _note_hits(self, got: Sequence[Answer], result: StageResult) -> None:
        num_tokens = sum(answer.num_cached_tokens for answer in got)
        result.notes["hit_tokens"] = num_tokens
        if not num_tokens and not result.problems:
            result.problems.append("no request found the prefix that another has left")

    def _timed(self, asked: Sequence[Canary], *, rows: bool = True) -> tuple[list[Answer], float]:
        started = time.perf_counter()
        answers = self._driver.run(asked, rows=rows)
        return answers, time.perf_counter() - started

    def _time_again(
        self, result: StageResult, part_on: Sequence[Canary], part_off: Sequence[Canary], *off: str
    ) -> None:
        """A part that seems slower gets two more runs, alternating with vLLM: the first ones may
        have compiled something."""
        for _ in range(2):
            if result.problems or not result.is_slower:
                return
            with self._switches.without(*off):
                result.without_s = min(result.without_s, self._timed(part_off)[1])
            result.with_s = min(result.with_s, self._timed(part_on)[1])


def _num_preemptions(answers: Sequence[Answer]) -> int:
    return sum(answer.num_preemptions for answer in answers)
