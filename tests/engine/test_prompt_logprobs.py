"""Log-probabilities of whole prompts beside the cached tokens: stock's numbers, computed once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from tests.effort import requests
from tests.engine.engine import Ask, Engine, greedy, words

SHARED, ENDING = 300, 15


def asking(top_k: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top_k, **more)


def endings_of(seed: int, top_k: int, salt: str | None = None) -> list[Ask]:
    """Four endings of one context."""
    context = words(SHARED, seed=seed)
    return [
        Ask(context + words(ENDING, seed=100 * seed + number), asking(top_k), salt)
        for number in (1, 2, 3, 4)
    ]


def rows_of(output: Any) -> list[tuple[float, int, list[float]]]:
    """For each prompt token but the first its log-probability and rank, and the likeliest ones."""
    rows = []
    for token, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        likely = sorted((one.logprob for one in row.values()), reverse=True)
        rows.append((row[token].logprob, row[token].rank, likely))
    return rows


def assert_same_rows(got: Sequence[Any], want: Sequence[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.prompt_logprobs[0] is None
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
        for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
            assert abs(mine[1] - theirs[1]) <= 1  # of tokens that are equally likely
            assert mine[2] == pytest.approx(theirs[2], abs=1e-4)


def random_bursts(seed: int) -> list[list[Ask]]:
    """Requests that share beginnings, some with log-probabilities, in bursts."""
    rng = random.Random(seed)
    contexts = [words(rng.randrange(1, 400), seed=number) for number in range(4)]
    bursts = []
    for _ in range(requests(12)):
        burst = []
        for _ in range(rng.randrange(1, 6)):
            prompt = rng.choice(contexts)
            prompt = prompt[: rng.choice([len(prompt), rng.randrange(1, len(prompt) + 1)])]
            prompt = prompt + words(rng.choice([0, 1, 2, 30]), seed=rng.randrange(6))
            if rng.random() < 0.3:
                contexts.append(prompt)
            top_k = rng.choice([None, 0, 1, 1, 5, 7])
            params = asking(top_k) if top_k is not None else greedy(rng.choice([1, 4]))
            burst.append(Ask(prompt, params, rng.choice([None, None, "tenant"])))
        bursts.append(burst)
    return bursts


LIMITS = {"block_size": 32, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def stock_answers(start) -> list[list[Any]]:
    engine = start(**LIMITS)
    asked = [*random_bursts(seed=1), endings_of(1, top_k=5), endings_of(2, top_k=0)]
    return [engine.run(burst) for burst in asked]


@pytest.fixture(scope="module")
def engine(stock_answers, start) -> Engine:
    started: Engine = start(plugin={}, **LIMITS)
    return started


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine


def test_random_bursts_get_stocks_numbers(fresh, stock_answers):
    for burst, want in zip(random_bursts(seed=1), stock_answers, strict=False):
        got = fresh.run(burst)
        pairs = [
            (one, other)
            for ask, one, other in zip(burst, got, want, strict=True)
            if ask.params.prompt_logprobs is not None
        ]
        assert_same_rows([one for one, _ in pairs], [other for _, other in pairs])
        fresh.check_nothing_is_left()
    assert fresh.scheduler.parts.select.counters.prompt_logprobs_cached > 0


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_shared_context_is_computed_once(fresh, stock_answers, top_k, at_once):
    asks = endings_of(1 if top_k else 2, top_k)
    fresh.reset_counts()
    got = fresh.run(asks) if at_once else [fresh.run([ask])[0] for ask in asks]
    # The token before each ending is computed with it.
    assert fresh.computed_tokens == SHARED + 4 * ENDING + 3
    assert_same_rows(got, stock_answers[-2 if top_k else -1])
    fresh.reset_counts()
    assert_same_rows(fresh.run(asks), got)
    assert fresh.computed_tokens == 4 * 2


def test_rows_are_not_known_of_tokens_that_others_cached(fresh):
    """The KV of a plain request, of another tenant, or rows with fewer likely tokens: computed."""
    context = words(SHARED, seed=9)
    fresh.run([Ask(context, greedy(1)), Ask(context, asking(1)), Ask(context, asking(5), "a")])
    for top_k, salt, num_computed in (
        (1, None, 2),
        (5, "a", 2),
        (5, None, SHARED),
        (1, None, 2),
        (1, "b", SHARED),
        (6, None, SHARED),
    ):
        fresh.reset_counts()
        fresh.run([Ask(context, asking(top_k), salt)])
        assert fresh.computed_tokens == num_computed
