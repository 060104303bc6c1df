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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sgl_vllm.self_check import canaries as make
from sgl_vllm.self_check.canaries import Canary, Shape
from sgl_vllm.self_check.comparison import Answer, compare, tolerance_of
from sgl_vllm.self_check.driver import Driver, RunFailed
from sgl_vllm.self_check.report import PartReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sgl_vllm.scheduler.assembly import Parts


@contextlib.contextmanager
def without(parts: Parts, *names: str) -> Iterator[None]:
    """While inside, `jump_forward` or `select` do nothing. Only at idle."""
    jump, select = parts.jump, parts.select
    if "jump_forward" in names:
        parts.jump = None
    if "select" in names:
        parts.select = None
    parts.have_changed()
    try:
        yield
    finally:
        parts.jump, parts.select = jump, select
        parts.have_changed()


class Stages:
    """The stages on one engine."""

    def __init__(self, driver: Driver, shape: Shape, parts: Parts, config: VllmConfig) -> None:
        model = config.model_config
        self._driver = driver
        self._shape = shape
        self._parts = parts
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._has_logprobs = model.logprobs_mode in ("raw_logprobs", "processed_logprobs")
        self._can_chunk = config.scheduler_config.enable_chunked_prefill
        self._cold: list[Answer] = []
        self.noise = 0.0

    @property
    def tolerance(self) -> float:
        return tolerance_of(self._dtype, self.noise)

    def run(self, found: PartReport) -> None:
        """Run the stage of a part, and add to `found` what it finds.

        Raises:
            RunFailed: a run did not finish.
        """
        self._driver.empty_cache()
        getattr(self, f"_{found.name}")(found)

    def measure_noise(self) -> None:
        """How much the answers of two batches without cache hits differ.

        Raises:
            RunFailed: their answers cannot be compared, so no part can be checked.
        """
        plain = make.cold(make.hits(self._shape))
        with without(self._parts, "jump_forward", "select"):
            self._cold = self._driver.run(plain)
            again = self._driver.run(plain[::-1])
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
            got = self._driver.run(hits)
            self._compare(got, self._cold, found)
            tight = self._with_little_room(hits, 2 * make.NUM_PREFIXES + len(hits) + 1)
            self._compare(tight or got, self._cold, found)
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
            got = self._driver.run(asked, rows=self._has_logprobs)
            tight = self._with_little_room(asked, num_prompt_blocks + 1, rows=self._has_logprobs)
            found_answers = [answers for answers in (got, tight) if answers]
            for answers in found_answers:
                found.problems.extend(self._wrong_texts(asked, answers))
            if found.problems:
                return
            with without(self._parts, "jump_forward"):
                want: list[Answer] = []
                for answers in found_answers:
                    if [one.tokens for one in want] != [one.tokens for one in answers]:
                        want = self._one_by_one(asked, answers)
                    self._compare(answers, want, found)
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
            want = self._driver.run(whole)
            self._driver.empty_cache()
            self._compare(self._driver.run(by_select), want, found)
            cached = self._driver.run(by_select)
            self._compare(cached, want, found)
            if self._can_chunk:
                self._driver.empty_cache()
                with self._driver.small_steps(self._shape.block_size + 5):
                    in_chunks = self._driver.run(by_select)
                self._compare(in_chunks, want, found)
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


def _num_preemptions(answers: Sequence[Answer]) -> int:
    return sum(answer.num_preemptions for answer in answers)
