"""What the prefix cache finds, in which order requests are admitted, and what `select` computes, on
the real engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import SamplingParams

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.radix.tree import RadixTree
from tests.effort import requests
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.machine import Machine


def cached_tokens(engine: Engine, *asks: Ask) -> list[int | None]:
    """Each request on its own, after the one before it has finished."""
    return [engine.run([ask])[0].num_cached_tokens for ask in asks]


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    started: Engine = start(plugin={}, block_size=128, num_gpu_blocks_override=64)
    return started


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    """The engine with an empty cache."""
    assert engine.llm.reset_prefix_cache()
    engine.check_nothing_is_left()
    return engine


def test_hits_end_at_the_last_shared_token_that_was_computed(fresh):
    for shared in (1, 100, 127, 128, 129, 300):
        prompts = words(300), words(300)[:shared] + words(40, seed=1)
        assert cached_tokens(fresh, *(Ask(prompt, greedy()) for prompt in prompts)) == [0, shared]
        assert fresh.llm.reset_prefix_cache()
    # One token at least has to run, or there is nothing to sample from. Tenants share nothing.
    asks = [Ask(words(200), greedy(), salt) for salt in ("a", "b", None, "a")]
    assert cached_tokens(fresh, *asks) == [0, 0, 0, 199]


def test_a_request_that_runs_is_found_by_those_that_come_later(fresh):
    """Stock shares full blocks of running requests; ours shares what is computed, to the token."""
    prompt = words(100)
    fresh.begin("long", prompt, greedy(30), num_steps=3)
    fresh.begin("late", prompt[:80] + words(9, seed=2), greedy(1))
    assert fresh.finish()["late"].num_cached_tokens == 80


# -- select ---------------------------------------------------------------------------------------

PREFIX_TOKENS, CHOICE_TOKENS, NUM_CHOICES = 600, 5, requests(8)


def choices() -> tuple[list[int], list[list[int]]]:
    rng = random.Random(3)
    prefix = [rng.randrange(10, 2000) for _ in range(PREFIX_TOKENS)]
    return prefix, [
        [rng.randrange(10, 2000) for _ in range(CHOICE_TOKENS)] for _ in range(NUM_CHOICES)
    ]


def scoring(score_from: object = None, top_k: int = 0) -> SamplingParams:
    extra = {} if score_from is None else {"extra_args": {SCORE_FROM: score_from}}
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top_k, **extra)


def scores(output, count: int) -> list[float]:
    rows = output.prompt_logprobs[-count:]
    return [
        row[token].logprob
        for row, token in zip(rows, output.prompt_token_ids[-count:], strict=True)
    ]


def test_scores_are_stocks_and_the_prefix_is_not_computed_again(fresh):
    prefix, endings = choices()
    asks = [Ask(prefix + ending, scoring(PREFIX_TOKENS)) for ending in endings]
    fresh.reset_counts()
    # With so many likely tokens, no log-probabilities are kept.
    want = fresh.run([Ask(ask.prompt, scoring(top_k=6)) for ask in asks])
    assert fresh.computed_tokens >= NUM_CHOICES * PREFIX_TOKENS
    for num_cached in (PREFIX_TOKENS, 200):
        assert fresh.llm.reset_prefix_cache()
        fresh.run([Ask(prefix[:num_cached], greedy(1))])
        fresh.reset_counts()
        if num_cached < PREFIX_TOKENS:
            fresh.run(asks[:1])
            assert fresh.computed_tokens == PREFIX_TOKENS + CHOICE_TOKENS - num_cached
            break
        got = fresh.run(asks)
        assert fresh.computed_tokens == NUM_CHOICES * (CHOICE_TOKENS + 1)
        assert all(len(one.prompt_logprobs) == 1 + CHOICE_TOKENS for one in got)
        for one, other in zip(got, want, strict=True):
            wanted = pytest.approx(scores(other, CHOICE_TOKENS), abs=1e-4)
            assert scores(one, CHOICE_TOKENS) == wanted
    fresh.check_nothing_is_left()


def test_an_impossible_index_scores_the_whole_prompt(fresh):
    ask = words(25)
    (want,) = fresh.run([Ask(ask, scoring())])
    for value in (0, -1, 10_000, "600", 2.5, True):
        (got,) = fresh.run([Ask(ask, scoring(value))])
        assert scores(got, len(ask) - 1) == pytest.approx(scores(want, len(ask) - 1), abs=1e-4)


def test_further_input_of_a_session_is_no_request_of_its_own():
    """It comes with the id of the request that began the session."""
    machine = Machine()
    scored: Any = {"name": "session", "resumable": True, "prompt_logprobs": 0}
    session = machine.add(range(100), extra_args={SCORE_FROM: 90}, **scored)
    further = machine.add(range(100, 150), extra_args={SCORE_FROM: 20}, **scored)
    first_scored = machine.scheduler.parts.radix.first_scored
    assert (first_scored.get(session), first_scored.get(further)) == (90, None)
    machine.abort(session)


# -- engines of their own -------------------------------------------------------------------------


def test_an_error_in_the_tree_switches_it_off_and_the_engine_goes_on(start, monkeypatch):
    engine = start(plugin={}, block_size=32)
    prefix, endings = choices()
    asks = [Ask(prefix + ending, scoring(500)) for ending in endings]
    want = engine.run(asks)

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(RadixTree, "insert", broken)
    # The request that met the error leaves nothing; from then on vLLM's own cache is at work.
    ask = Ask(words(100), greedy())
    assert cached_tokens(engine, ask, ask, ask) == [0, 0, 96]
    assert "switched off by an error" in engine.scheduler.sgl_vllm.stats().parts["radix"]
    engine.run([Ask(ask.prompt, greedy(1)) for ask in asks])  # blocks beyond the prefix
    count = PREFIX_TOKENS + CHOICE_TOKENS - 500
    for one, other in zip(engine.run(asks), want, strict=True):
        assert scores(one, count) == pytest.approx(scores(other, count), abs=1e-4)


@pytest.mark.parametrize("schedule", [False, True])
def test_with_a_tight_cache_the_order_decides_what_is_computed(start, schedule):
    """Requests of eight groups in turn; those of a group share 384 tokens."""
    engine = start({"schedule": schedule}, num_gpu_blocks_override=70, max_num_seqs=4)
    prefixes = [words(384, seed=group) for group in range(8)]
    asks = [
        Ask(prefix + words(20, seed=10 * number + group), greedy(4))
        for number in range(1, 7)
        for group, prefix in enumerate(prefixes)
    ]
    unique_tokens = 8 * 384 + len(asks) * 20
    engine.run(asks)
    num_prefilled = engine.computed_tokens - 3 * len(asks)
    if schedule:
        assert num_prefilled < 1.6 * unique_tokens
    else:
        assert num_prefilled > 4 * unique_tokens
    engine.check_nothing_is_left()
