"""Scoring choices on a cached prefix: stock's scores for a fraction of its work."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import SamplingParams

from sgl_vllm.protocol.request_keys import SCORE_FROM
from tests.effort import requests
from tests.engine.engine import Ask
from tests.engine.machine import Machine

PREFIX_TOKENS, CHOICE_TOKENS, NUM_CHOICES = 600, 5, requests(8)


def choices() -> tuple[list[int], list[list[int]]]:
    rng = random.Random(3)
    prefix = [rng.randrange(10, 2000) for _ in range(PREFIX_TOKENS)]
    return prefix, [
        [rng.randrange(10, 2000) for _ in range(CHOICE_TOKENS)] for _ in range(NUM_CHOICES)
    ]


def scoring(score_from: object = None) -> SamplingParams:
    extra = {} if score_from is None else {"extra_args": {"sgl_score_from": score_from}}
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **extra)


def scores(output, count: int) -> list[float]:
    rows = output.prompt_logprobs[-count:]
    return [
        row[token].logprob
        for row, token in zip(rows, output.prompt_token_ids[-count:], strict=True)
    ]


@pytest.fixture(scope="module")
def engine(start):
    return start(plugin={}, block_size=128)


def test_scores_are_stocks_and_the_prefix_is_not_computed_again(engine):
    prefix, endings = choices()
    want = engine.run([Ask(prefix + ending, scoring()) for ending in endings])
    assert engine.computed_tokens >= NUM_CHOICES * PREFIX_TOKENS
    engine.run([Ask(prefix, SamplingParams(max_tokens=1))])
    engine.reset_counts()
    got = engine.run([Ask(prefix + ending, scoring(PREFIX_TOKENS)) for ending in endings])
    assert engine.computed_tokens == NUM_CHOICES * (CHOICE_TOKENS + 1)
    assert all(len(one.prompt_logprobs) == 1 + CHOICE_TOKENS for one in got)
    for one, other in zip(got, want, strict=True):
        assert scores(one, CHOICE_TOKENS) == pytest.approx(scores(other, CHOICE_TOKENS), abs=1e-4)
    engine.check_nothing_is_left()


def test_a_partly_cached_prefix_is_read_as_far_as_it_goes(engine):
    prefix, endings = choices()
    assert engine.llm.reset_prefix_cache()
    engine.run([Ask(prefix[:200], SamplingParams(max_tokens=1))])
    engine.reset_counts()
    engine.run([Ask(prefix + endings[0], scoring(PREFIX_TOKENS))])
    assert engine.computed_tokens == PREFIX_TOKENS + CHOICE_TOKENS - 200


@pytest.mark.parametrize("value", [0, -1, 10_000, "600", 2.5, True])
def test_an_impossible_index_scores_the_whole_prompt(engine, value):
    prefix, endings = choices()
    ask = prefix[:20] + endings[0]
    want = engine.run([Ask(ask, scoring())])[0]
    got = engine.run([Ask(ask, scoring(value))])[0]
    assert scores(got, len(ask) - 1) == pytest.approx(scores(want, len(ask) - 1), abs=1e-4)


def test_scores_are_right_when_the_tree_is_gone(start):
    prefix, endings = choices()
    engine = start(plugin={}, block_size=32)
    want = engine.run([Ask(prefix + ending, scoring()) for ending in endings])
    engine.scheduler.parts.radix.pool.switch_off("off: by this test")
    full = [Ask(prefix + ending, SamplingParams(max_tokens=1)) for ending in endings]
    engine.run(full)  # now vLLM's own cache holds blocks beyond the prefix
    score_from = 500
    got = engine.run([Ask(prefix + ending, scoring(score_from)) for ending in endings])
    count = PREFIX_TOKENS + CHOICE_TOKENS - score_from
    for one, other in zip(got, want, strict=True):
        assert scores(one, count) == pytest.approx(scores(other, count), abs=1e-4)


def test_further_input_of_a_session_is_no_request_of_its_own():
    """It comes with the id of the request that began the session."""
    machine = Machine()
    scored: Any = {"name": "session", "resumable": True, "prompt_logprobs": 0}
    session = machine.add(range(100), extra_args={SCORE_FROM: 90}, **scored)
    further = machine.add(range(100, 150), extra_args={SCORE_FROM: 20}, **scored)
    first_scored = machine.scheduler.parts.radix.first_scored
    assert (first_scored.get(session), first_scored.get(further)) == (90, None)
    machine.abort(session)
