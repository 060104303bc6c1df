"""Under greedy sampling every request gets stock's answer: random programs of 520 requests with
prefixes cut anywhere, grammars, stops, penalties, aborts, preemption and caches that are too small.

In the batch-invariant mode answers are equal or wrong. Where stock's own answers depend on the
batch (always in the plain mode, and in the other if this test finds so), an answer may part from
stock's only where two tokens' logits are next to equal, and the plugin's may do so about as often
as stock's own part from each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engine import Ask, Engine
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import (
    STOCK_WITHOUT_CACHE,
    Difference,
    Played,
    References,
    Setting,
    differences,
    play,
)
from tests.engine.programs import MAX_MODEL_LEN, Program, random_program
from tests.engine.ties import JUDGE, gap
from tests.gpu.configuration import on_cpu, unverified
from tests.gpu.conftest import CONFIGURATION
from tests.gpu.numerics import IS_PLAIN, LOGPROB_TOLERANCE, most_parted, near_tie

Start = Callable[..., Engine]

NUM_CALLS = int(os.environ.get("SGL_VLLM_GPU_REQUESTS", "520"))
MOST_JUDGED = 60
"""Answers: each takes a request of its own."""
BLOCK_SIZE = 32 if on_cpu() else 16
FEWEST_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1

TIGHT = Setting(
    {},
    block_size=BLOCK_SIZE,
    num_blocks=FEWEST_BLOCKS + 12,
    max_num_batched_tokens=128,
    max_num_seqs=16,
)
ROOMY = Setting({}, block_size=BLOCK_SIZE, num_blocks=FEWEST_BLOCKS * 8, max_num_seqs=32)


@dataclass
class Case:
    """One program, and what stock answers to it."""

    program: Program
    start: Start
    stock: Played
    narrowed: Played | None = None

    @classmethod
    def of(cls, start: Start) -> Case:
        program = random_program(seed=1, num_calls=NUM_CALLS)
        engine = started(start, STOCK_WITHOUT_CACHE)
        return cls(program, start, play(engine, program, None, give_up=False))

    def play(self, setting: Setting) -> tuple[Played, list[Difference]]:
        """What an engine of this setting answers, and where that is not what it must be."""
        engine = started(self.start, setting)
        played = play(engine, self.program, self.stock.prompts)
        if setting.plugin is not None:
            parts = engine.scheduler.sgl_vllm.stats().parts
            print(f"\n{CONFIGURATION}: {parts}\n{dict(played.counts)}")
            jumps = parts["jump_forward"] == "on"
            setting = replace(setting, plugin={**setting.plugin, "jump_forward": jumps})
        references = References(self.stock, self.stock)
        if setting.is_canonical:
            references = References(self._narrowed(), self.stock)
        want = references.expected_by(setting, self.program)
        found = differences(self.program, want, played, logprob_tolerance=LOGPROB_TOLERANCE)
        return played, list(found)

    def gaps(self, found: list[Difference]) -> list[float]:
        """How far apart the logits are where answers part; infinity if they part otherwise. Of the
        first answers alone: where more part, their number is wrong itself."""
        if not found:
            return []
        engine = self.start(None, **JUDGE)
        return [gap(engine, difference) for difference in found[:MOST_JUDGED]]

    def _narrowed(self) -> Played:
        """Stock with forced text spelt canonically, by a scheduler that steps one by one. Its
        prompts are stock's, as everybody's are."""
        if self.narrowed is None:
            plain = replace(CONFIGURATION, runner="v1", scheduling="sync")
            engine = started(self.start, STOCK_WITHOUT_CACHE, configuration=plain)
            with decoding_one_by_one(engine.scheduler):
                self.narrowed = play(engine, self.program, self.stock.prompts, give_up=False)
        return self.narrowed


def started(start: Start, setting: Setting, **options: Any) -> Engine:
    """Warm, so that nothing that is compiled first looks like a hang."""
    plugin = setting.plugin if setting.plugin is None else {**setting.plugin, **unverified()}
    engine = start(plugin, **options, **setting.engine_args)
    setting.prepare(engine)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    engine.run([Ask([*range(10, 10 + length)], params) for length in (5, 40, 300)])
    assert engine.llm.reset_prefix_cache()
    return engine


@pytest.fixture(scope="module")
def case(start: Start) -> Case:
    return Case.of(start)


@pytest.mark.parametrize("setting", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_answers_are_those_of_stock(
    case: Case, setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    played, found = case.play(setting)
    counts = played.counts
    assert len(played.answers) >= NUM_CALLS
    assert counts["partial hits"] > NUM_CALLS // 10
    assert counts["aborts"] > NUM_CALLS // 50
    if setting is TIGHT:
        assert counts["preemptions"] > 0
    # Smaller batches than the plugin's or stock's: does stock answer as it did?
    other = replace(setting, plugin=None, max_num_seqs=6)
    of_stock = case.play(other)[1] if found or IS_PLAIN else []
    wrong = [
        (distance, difference)
        for distance, difference in zip(case.gaps(found), found, strict=False)
        if distance > near_tie(len(of_stock))
    ]
    record_property("compared", len(played.answers))
    record_property("wrong", len(wrong))
    record_property("near ties", len(found) - len(wrong))
    record_property("near ties of stock with itself", len(of_stock))
    record_property("forced tokens", counts["forced tokens"])
    first = "\n".join(f"logits {apart:.3g} apart: {one}" for apart, one in wrong[:3])
    assert not wrong, f"{len(wrong)} of {len(played.answers)} differ:\n{first}"
    assert len(found) <= most_parted(len(of_stock), len(played.answers))
