"""Forced runs too short for a jump beside a step in flight: decoded, in canonical tokens."""

from __future__ import annotations

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request

from sgl_vllm.jump.part import SENT_PER_PASS, least_run
from sgl_vllm.jump.short_runs import ShortRuns
from tests.engine.engine import Ask, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.platforms import asynchronous

VOCABULARY = 128


def request(name: str = "one") -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=20), None)


def legal(masks: GrammarOutput) -> list[list[int]]:
    """The tokens of each row's bits."""
    rows = np.unpackbits(masks.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in rows]


def test_only_the_next_token_of_a_run_is_legal() -> None:
    runs, one, other = ShortRuns(), request(), request("other")
    for token in (31, 32, 64):  # the last bit of a word, and first ones
        runs.begin(one, [token, 5])
        masks = GrammarOutput(
            ["other", "one", "gone"], np.full((3, VOCABULARY // 32), -1, np.int32)
        )
        runs.narrow(masks, {"one": one, "other": other})
        anything = list(range(VOCABULARY))
        assert legal(masks) == [anything, [token], anything]


def test_a_run_never_makes_an_illegal_token_legal() -> None:
    runs, one = ShortRuns(), request()
    runs.begin(one, [31])
    masks = GrammarOutput(["one"], np.array([[0b1010, 0, 0, 0]], np.int32))
    runs.narrow(masks, {"one": one})
    assert legal(masks) == [[1, 3]]
    assert one not in runs


def test_a_run_goes_on_as_long_as_its_tokens_come() -> None:
    runs, one = ShortRuns(), request()
    runs.begin(one, [7, 8])
    for token in (7, 8):
        assert one in runs
        one.append_output_token_ids(token)
        assert runs.has_next(one)
    assert one not in runs
    one.append_output_token_ids(9)
    assert not runs.has_next(one)


def test_listeners_hear_where_a_run_will_be() -> None:
    runs, one = ShortRuns(), request()
    heard: list[tuple[Request, int, int]] = []
    runs.listeners.append(lambda *run: heard.append(run))
    one.append_output_token_ids([5, 6])
    runs.begin(one, [7, 8, 9])
    assert heard == [(one, 2, 5)]


def test_a_run_ends_with_any_other_token() -> None:
    runs, one = ShortRuns(), request()
    runs.begin(one, [7, 8])
    one.append_output_token_ids(9)
    assert not runs.has_next(one)
    assert one not in runs


def test_a_request_that_is_gone_leaves_nothing() -> None:
    runs, one = ShortRuns(), request()
    runs.begin(one, [7, 8])
    del one
    assert not runs._left


# Runs of one token, of two, and of more.
MIXED = r"([0-9]x){4}: [a-z]{2}, [0-9] of 9\. This is where it ends, with [0-9] left over\."


@pytest.mark.parametrize("regex", [r"([0-9]x){12}", MIXED])
def test_answers_are_those_of_jumps_and_passes_those_of_decoding(
    start, regex: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asynchronous.allow(monkeypatch)
    params = SamplingParams(
        temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex=regex)
    )
    asks = [Ask(words(20, seed=number), params) for number in range(6)]
    stock = start(async_scheduling=False)
    with decoding_one_by_one(stock.scheduler):
        want = stock.tokens(asks)
    passes = {}
    for is_on in (False, True):
        plugin = {"self_check": "off", "jump_forward": is_on}
        engine = start(plugin=plugin, async_scheduling=True)
        engine.run(asks)  # the format is compiled
        assert engine.llm.reset_prefix_cache()
        engine.reset_counts()
        got = engine.tokens(asks)
        passes[is_on] = engine.forward_passes
        jumps = engine.scheduler.sgl_vllm.stats().jump_forward
        engine.check_nothing_is_left()
    assert got == want
    assert passes[True] <= passes[False]
    if regex == MIXED:
        assert jumps.forced_tokens > 6 * 5
        assert jumps.forced_tokens >= 3 * jumps.jumps
    else:
        assert jumps.stale_tokens == 0


def test_a_run_must_be_longer_than_what_it_costs():
    assert least_run(100, has_step_in_flight=False) == 1
    assert least_run(100, has_step_in_flight=True) == 3
    assert least_run(SENT_PER_PASS, has_step_in_flight=False) == 2
    assert least_run(2 * SENT_PER_PASS, has_step_in_flight=True) == 5
