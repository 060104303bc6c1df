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

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sgl_vllm.self_check import canaries as make
from sgl_vllm.self_check.canaries import Canary, Shape
from sgl_vllm.self_check.comparison import Answer, compare, tolerance_of
from sgl_vllm.self_check.driver import Driver, RunFailed
from sgl_vllm.self_check.report import PartReport

if TYPE_CHECKING:
    from sgl_vllm.scheduler.assembly import Parts


@contextlib.contextmanager
def without(parts: Parts, *names: str) -> Iterator[None]:
    """While inside, `jump_forward` or `select` do nothing. Only at idle."""
    jump, select = parts.jump, parts.select
    if "jump_forward" in names:
        parts.jump = None
    if "select" in names:
        parts.select = None
    try:
        yield
    finally:
        parts.jump, parts.select = jump, select


class Stages:
    """The stages on one engine.

    Args:
        dtype: the model's, such as "bfloat16".
        has_logprobs: whether log-probabilities and jumps can be asked for together.
    """

    def __init__(
        self, driver: Driver, shape: Shape, parts: Parts, *, dtype: str, has_logprobs: bool
    ) -> None:
        self._driver = driver
        self._shape = shape
        self._parts = parts
        self._dtype = dtype
        self._has_logprobs = has_logprobs
        self._cold: list[Answer] = []
        self._cold_s = 0.0
        self.noise = 0.0

    @property
    def tolerance(self) -> float:
        return tolerance_of(self._dtype, self.noise)

    def run(self, found: PartReport) -> None:
        """Run the stage of a part, and add to `found` what it finds.

        Raises:
            RunFailed: a run did not finish.
        """
        stages = {
            "radix": self._radix,
            "fsm": self._fsm,
            "jump_forward": self._jump_forward,
            "select": self._select,
        }
        self._driver.empty_cache()
        stages[found.name](found)

    def measure_noise(self) -> None:
        """How much the answers of two batches without cache hits differ.

        Raises:
            RunFailed: their answers cannot be compared, so no part can be checked.
        """
        plain = make.cold(make.hits(self._shape))
        with without(self._parts, "jump_forward", "select"):
            self._cold = self._driver.run(plain)
            again, self._cold_s = self._timed(plain[::-1])
        found = PartReport("noise")
        compare(again[::-1], self._cold, float("inf"), found)
        if found.problems:
            raise RunFailed(f"two runs of the same requests differ: {found.problems[0]}")
        self.noise = found.largest_difference

    def _radix(self, found: PartReport) -> None:
        """Hits inside a block, several in a step; and preempted requests that are resumed."""
        hits = make.hits(self._shape)
        with without(self._parts, "jump_forward", "select"):
            self._driver.run(make.prefixes(self._shape))
            got, found.with_s = self._timed(hits)
            self._compare(got, self._cold, found)
            tight = self._with_little_room(hits, 2 * make.NUM_PREFIXES + len(hits) + 1)
            self._compare(tight or got, self._cold, found)
            found.without_s = self._cold_s
            self._time_again(found, hits, make.cold(hits))
        self._note_hits(got, found)
        found.notes["preemptions"] = _num_preemptions(tight)

    def _fsm(self, found: PartReport) -> None:
        """Masks of several formats in one batch. Jumps are off."""
        asked = make.structured(self._shape)
        with without(self._parts, "jump_forward", "select"):
            got = self._driver.run(asked)
            found.problems.extend(self._wrong_texts(asked, got))
            if not found.problems:
                self._compare(got, self._driver.run(asked, reference=True), found)

    def _jump_forward(self, found: PartReport) -> None:
        """Jumps beside requests that decode, with room and without."""
        asked = make.structured(self._shape)
        num_prompt_blocks = sum(-(-len(one.prompt) // self._shape.block_size) for one in asked)
        with without(self._parts, "select"):
            got, found.with_s = self._timed(asked, rows=self._has_logprobs)
            tight = self._with_little_room(asked, num_prompt_blocks + 1, rows=self._has_logprobs)
            for answers in filter(None, (got, tight)):
                found.problems.extend(self._wrong_texts(asked, answers))
            if found.problems:
                return
            with without(self._parts, "jump_forward"):
                want: list[Answer] = []
                for answers in filter(None, (got, tight)):
                    if [one.tokens for one in want] != [one.tokens for one in answers]:
                        want = self._one_by_one(asked, answers)
                    self._compare(answers, want, found)
                _, found.without_s = self._timed(asked, rows=self._has_logprobs)
            self._time_again(found, asked, asked, "jump_forward")
        found.notes["forced_tokens"] = sum(len(answer.forced) for answer in got)
        found.notes["preemptions"] = _num_preemptions(tight)

    def _one_by_one(self, asked: Sequence[Canary], got: Sequence[Answer]) -> list[Answer]:
        """The same forced tokens, each decoded in its own pass, after prompts that are computed
        again."""
        self._driver.empty_cache()
        forced = [{place: answer.tokens[place] for place in answer.forced} for answer in got]
        return self._driver.run(make.cold(asked), reference=True, forced=forced)

    def _wrong_texts(self, asked: Sequence[Canary], got: Sequence[Answer]) -> Iterator[str]:
        """Answers that do not fit their format, or have forced tokens that it does not force."""
        table = self._driver.table
        assert table is not None
        for number, (canary, answer) in enumerate(zip(asked, got, strict=True)):
            if (language := canary.language) is None:
                continue
            why = table.why_not_forced(language, answer.tokens, answer.forced)
            if answer.finish_reason == "stop":
                why = table.why_not_in(language, answer.tokens) or why
            elif answer.finish_reason != "length":
                why = f"it ended by {answer.finish_reason or 'nothing'}"
            if why:
                yield f"request {number}: {why}"

    def _select(self, found: PartReport) -> None:
        """Scores of choices: with nothing cached, with the prefix cached, and in chunks."""
        whole = make.scored(self._shape, by_select=False)
        by_select = make.scored(self._shape, by_select=True)
        with without(self._parts, "jump_forward"):
            want, found.without_s = self._timed(whole)
            self._driver.empty_cache()
            self._compare(self._driver.run(by_select), want, found)
            cached, found.with_s = self._timed(by_select)
            self._compare(cached, want, found)
            if self._driver.can_chunk:
                self._driver.empty_cache()
                with self._driver.small_steps(self._shape.block_size + 5):
                    in_chunks = self._driver.run(by_select)
                self._compare(in_chunks, want, found)
            self._time_again(found, by_select, whole)
        self._note_hits(cached, found)

    # -- all --------------------------------------------------------------------------------------

    def _with_little_room(
        self, asked: Sequence[Canary], num_blocks: int, *, rows: bool = True
    ) -> list[Answer]:
        """The answers where requests preempt each other; none where it is not known with how many
        blocks they do."""
        if not self._shape.can_be_tight:
            return []
        with self._driver.little_room(num_blocks):
            return self._driver.run(make.at_once(asked), rows=rows)

    def _compare(self, got: Sequence[Answer], want: Sequence[Answer], found: PartReport) -> None:
        compare(got, want, self.tolerance, found)

    def _note_hits(self, got: Sequence[Answer], found: PartReport) -> None:
        num_tokens = found.notes["hit_tokens"] = sum(answer.num_cached_tokens for answer in got)
        if not num_tokens and not found.problems:
            found.problems.append("no request found the prefix that another has left")

    def _timed(self, asked: Sequence[Canary], *, rows: bool = True) -> tuple[list[Answer], float]:
        started = time.perf_counter()
        answers = self._driver.run(asked, rows=rows)
        return answers, time.perf_counter() - started

    def _time_again(
        self, found: PartReport, part_on: Sequence[Canary], part_off: Sequence[Canary], *off: str
    ) -> None:
        """A part that seems slower gets two more runs, alternating with vLLM: the first ones may
        have compiled something."""
        for _ in range(2):
            if found.problems or not found.is_slower:
                return
            with without(self._parts, *off):
                found.without_s = min(found.without_s, self._timed(part_off)[1])
            found.with_s = min(found.with_s, self._timed(part_on)[1])


def _num_preemptions(answers: Sequence[Answer]) -> int:
    return sum(answer.num_preemptions for answer in answers)
