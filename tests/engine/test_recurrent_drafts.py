"""Recurrent layers beside speculative decoding: stock's answers, at least 98% of the cached tokens
without drafts, and no more passes of structured output.

On vLLM's V2 runner only.
"""

from __future__ import annotations

import pytest

from benchmarks.ab.workloads.json_regex import CHARACTER
from tests.effort import requests, some_nightly
from tests.engine.drafters import NUM_DRAFTS, counting_drafts, speculation, why_it_cannot_run
from tests.engine.engine import Ask, Engine, greedy, in_format, tokens_of, words
from tests.engine.models import starting
from tests.platforms.platform import chosen

pytestmark = pytest.mark.platforms

SETTING = {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 560}


def conversations(engine: Engine) -> tuple[list[list[int]], int]:
    """The answers of two turns of each conversation, and the cached tokens of all second turns."""
    prompts = [words(300, seed=7) + words(20 + 9 * n, seed=n) for n in range(requests(12))]
    prompts.append([5])
    first = engine.run([Ask(prompt, greedy(20 + n)) for n, prompt in enumerate(prompts)])
    answers = [tokens_of(one) for one in first]
    again = [
        Ask(prompt + answer + words(5, seed=n), greedy(9))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    second = engine.run(again)
    return [*answers, *map(tokens_of, second)], sum(one.num_cached_tokens for one in second)


def passes(engine: Engine) -> int:
    """Of JSON by a regex."""
    engine.reset_counts()
    engine.run([Ask(words(20, seed=n), in_format(72, {"regex": CHARACTER})) for n in range(2)])
    return engine.forward_passes


@pytest.mark.parametrize("method", some_nightly(["mtp", "ngram"], ["mtp"]))
def test_answers_are_those_of_stock_and_drafts_cost_hardly_any_hits_or_passes(
    start, method, request, tmp_path
):
    platform = chosen(request.config)
    if reason := why_it_cannot_run(method, platform, "qwen3_next_mtp"):
        pytest.skip(reason)
    drafts = {"speculative_config": speculation(method, tmp_path, is_async=platform.is_async)}
    with starting("qwen3_next_mtp", start, tmp_path) as start_engine:
        stock, _ = conversations(start_engine(None, **SETTING, enable_prefix_caching=False))
        alone = start_engine({}, **SETTING)
        _, num_cached = conversations(alone)
        num_passes = passes(alone)
        engine = start_engine({}, **SETTING, **drafts)
        assert set(engine.scheduler.parts.states().values()) == {"on"}
        with counting_drafts(engine) as counts:
            answers, num_cached_beside_drafts = conversations(engine)
        assert answers == stock
        assert counts["accepted"] > 0
        assert num_cached_beside_drafts >= num_cached - NUM_DRAFTS * len(stock) // 2
        assert num_cached_beside_drafts >= 0.98 * num_cached
        assert passes(engine) <= num_passes
        engine.check_nothing_is_left()
