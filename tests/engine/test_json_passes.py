"""Forward passes of JSON, held against the tokens that its format leaves undecided."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.ab.workloads.json_regex import CHARACTER
from benchmarks.schemas import is_plain, schemas
from tests.effort import requests
from tests.engine.engine import Ask, Engine, words
from tests.platforms.platform import VLLMS_CHOICE_ON_A_CPU, chosen

pytestmark = pytest.mark.platforms

NUM_REQUESTS = 8
MAX_TOKENS = 96

SPARE_PASSES = 2
"""Of each request, on average: one in flight when it ended, and one at a jump that was not
expected, most of them where a string or a number ends in a format not seen before."""

MODES: dict[str, dict[str, Any]] = {
    "off": {"jump_forward": False},
    "exact": {"jump_mode": "exact"},
    "canonical": {"jump_mode": "canonical"},
}


@dataclass
class Passes:
    """Forward passes of some requests, and the tokens of their output that were not forced."""

    num_requests: int
    num_passes: int
    num_undecided: int


def formats() -> dict[str, list[StructuredOutputsParams]]:
    plain = [one.text for one in schemas(None) if is_plain(json.loads(one.text))]
    return {
        "regex": [StructuredOutputsParams(regex=CHARACTER) for _ in range(NUM_REQUESTS)],
        "schema": [StructuredOutputsParams(json=text) for text in plain[:NUM_REQUESTS]],
    }


def run(engine: Engine, structured: list[StructuredOutputsParams], at_once: int) -> Passes:
    def asks(max_tokens: int) -> list[Ask]:
        return [
            Ask(
                words(20, seed=number),
                SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=one),
            )
            for number, one in enumerate(structured)
        ]

    engine.run(asks(1))  # the formats are compiled
    assert engine.llm.reset_prefix_cache()
    engine.reset_counts()
    before = num_forced(engine)
    wanted = asks(MAX_TOKENS)
    num_tokens = sum(
        len(output.outputs[0].token_ids)
        for start in range(0, len(structured), at_once)
        for output in engine.run(wanted[start : start + at_once])
    )
    engine.check_nothing_is_left()
    return Passes(
        len(structured), engine.forward_passes, num_tokens - (num_forced(engine) - before)
    )


def num_forced(engine: Engine) -> int:
    counters = engine.scheduler.sgl_vllm.stats().jump_forward
    return counters.forced_tokens if counters is not None else 0


@pytest.fixture(scope="module")
def measured(request, start) -> dict[tuple[str, str, int], Passes]:
    """By mode, format, and requests at a time."""
    found = {}
    # Where passes do not overlap, few requests say as much.
    overlaps = chosen(request.config) != VLLMS_CHOICE_ON_A_CPU
    num_alone = min(NUM_REQUESTS, requests(2 * NUM_REQUESTS)) if overlaps else 2
    for mode, options in MODES.items():
        engine: Engine = start(
            plugin={"self_check": "off", **options},
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )
        # Compiled when they are added, so that requests at once start in the same pass.
        engine.core.structured_output_manager._use_async_grammar_compilation = False
        for kind, structured in formats().items():
            for at_once, num_requests in ((1, num_alone), (NUM_REQUESTS, NUM_REQUESTS)):
                found[mode, kind, at_once] = run(engine, structured[:num_requests], at_once)
                print(mode, kind, at_once, found[mode, kind, at_once])
    return found


@pytest.mark.parametrize("at_once", [1, NUM_REQUESTS])
@pytest.mark.parametrize("kind", ["regex", "schema"])
def test_a_pass_decides_a_token(measured, kind, at_once):
    jumping = measured["canonical", kind, at_once]
    assert jumping.num_passes <= jumping.num_undecided + SPARE_PASSES * jumping.num_requests
    if at_once == 1:  # all at a time take as many passes as the longest answer
        assert jumping.num_passes < 0.9 * measured["off", kind, at_once].num_passes


@pytest.mark.parametrize("at_once", [1, NUM_REQUESTS])
@pytest.mark.parametrize("kind", ["regex", "schema"])
def test_exact_jumps_never_take_more_passes_than_decoding(measured, kind, at_once):
    decoding = measured["off", kind, at_once]
    assert measured["exact", kind, at_once].num_passes <= decoding.num_passes
