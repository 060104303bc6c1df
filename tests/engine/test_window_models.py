"""Exact hits, and stock's answers and scores, on models whose layers read different parts of what
precedes a token (sliding windows, or chunks, beside full attention), and with MLA. The models are
small and random.

vLLM computes a prompt and a decoded token by different formulas for MLA, so log-probabilities move
by up to 3e-5 with how a request is cut into passes, in stock vLLM too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from sgl_vllm.protocol.request_keys import SCORE_FROM
from tests.effort import some_nightly
from tests.engine import window_models
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.play import LOGPROB_TOLERANCE
from tests.engine.sessions import Reply, again, in_order, num_shared, session, wrong
from tests.engine.soak_models import starting

NAMES = [*window_models.CONFIGS, "deepseek_v2"]


@pytest.fixture(scope="module", params=some_nightly(NAMES, ["gemma3", "deepseek_v2"]))
def start_model(request, start, tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    """`start`, with a model whose prefixes are cached unless asked not to."""
    with starting(request.param, start, tmp_path_factory.mktemp("models")) as start_engine:
        yield start_engine


@pytest.fixture(scope="module")
def cold(start_model) -> list[list[Reply]]:
    """The session on stock vLLM without a cache."""
    return session(start_model(enable_prefix_caching=False))


@pytest.fixture(scope="module")
def engine(cold, start_model) -> Engine:
    return start_model({}, num_gpu_blocks_override=2000)


def longest_hits(batches: Sequence[Sequence[Reply]]) -> list[int]:
    """For each request, how much of its prompt a request before it has computed. The last token of
    a prompt always runs. Requests of a batch share nothing that none before them has."""
    found: list[int] = []
    before: list[list[int]] = []
    for batch in batches:
        for reply in batch:
            shared = max((num_shared(reply.prompt, tokens) for tokens in before), default=0)
            found.append(min(shared, len(reply.prompt) - 1))
        before += [reply.computed for reply in batch]
    return found


def test_hits_are_the_longest_shared_prefix_and_answers_are_stocks(cold, engine):
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    assert engine.llm.reset_prefix_cache()
    warm = again(engine, cold)
    assert [reply.num_cached for reply in in_order(warm)] == longest_hits(warm)
    assert sum(longest_hits(warm)) > 5000
    assert not wrong(in_order(cold), in_order(warm))
    engine.check_nothing_is_left()


def test_scores_are_stocks_and_the_prefix_is_not_computed_again(engine):
    """`select` on a cached prefix that ends inside a block."""
    prefix, choices = words(333, seed=5), [words(5, seed=seed) for seed in range(4)]
    assert engine.llm.reset_prefix_cache()

    def scores(**more: Any) -> list[list[float]]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **more)
        outputs = engine.run([Ask(prefix + choice, params) for choice in choices])
        return [
            [
                row[token].logprob
                for row, token in zip(out.prompt_logprobs[-5:], choice, strict=True)
            ]
            for out, choice in zip(outputs, choices, strict=True)
        ]

    want = scores()
    engine.run([Ask(prefix, greedy())])
    engine.reset_counts()
    got = scores(extra_args={SCORE_FROM: len(prefix)})
    assert engine.computed_tokens == len(choices) * 6  # a choice, after the last token before it
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, abs=LOGPROB_TOLERANCE)
    engine.check_nothing_is_left()
