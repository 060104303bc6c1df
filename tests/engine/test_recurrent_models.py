"""Hits on models with recurrent layers: three of linear attention (Qwen3-Next) or of Mamba-2
(Granite 4) for each of full attention. The models are small and random.

`test_programs.py` compares the answers, and `test_groups.py` the ends of hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.effort import some_nightly
from tests.engine.engine import Ask, Engine, greedy, tokens_of, words
from tests.engine.models import MODELS, Model, starting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=some_nightly(["qwen3_next", "granite4"], ["qwen3_next"]))
def model(request) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def start_recurrent(model, start, tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    with starting(model, start, tmp_path_factory.mktemp("models")) as start_engine:
        yield start_engine


@pytest.fixture(scope="module")
def engine(start_recurrent) -> Engine:
    """After a check of itself."""
    started: Engine = start_recurrent(
        {"self_check": "on"}, num_gpu_blocks_override=2000, max_num_batched_tokens=2048
    )
    return started


def test_every_part_is_on_after_a_check_that_leaves_nothing(engine):
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    assert engine.scheduler.kv_cache_manager.sections()["cache"].tree_states == 0


def test_a_hit_that_ends_at_the_end_of_a_block_reads_all_of_it(model, engine):
    """vLLM's own copy of a block leaves out its end (`copy_whole_blocks`)."""
    size = engine.scheduler.block_size
    prompt, more = words(size - 1, seed=7), words(40, seed=8)

    def first_logprobs() -> list[float]:
        tokens = [5, 300, 301, 700, 1900]
        (output,) = engine.run([Ask(prompt + more, greedy(1, logprob_token_ids=tokens))])
        (row,) = output.outputs[0].logprobs
        return [row[token].logprob for token in tokens]

    cold = first_logprobs()
    assert engine.llm.reset_prefix_cache()
    engine.run([Ask(prompt, greedy(1))])
    hits = engine.scheduler.parts.radix.counters.hit_tokens
    assert first_logprobs() == pytest.approx(cold, abs=MODELS[model].tolerance)
    assert engine.scheduler.parts.radix.counters.hit_tokens == hits + size - 1
    engine.check_nothing_is_left()


def test_only_the_first_of_many_siblings_computes_what_they_share(engine):
    """vLLM issue 45238, where 40 of 64 requests hit."""
    asks = [Ask(words(750) + words(100, seed=seed), greedy(4)) for seed in range(1, 13)]
    (alone,) = engine.run(asks[:1])
    assert engine.llm.reset_prefix_cache()
    engine.reset_counts()
    results = engine.run(asks)
    assert sorted(result.num_cached_tokens for result in results) == [0] + [750] * 11
    assert engine.computed_tokens == 750 + 12 * (100 + 3)
    assert tokens_of(results[0]) == tokens_of(alone)


def test_siblings_wait_for_room_rather_than_compute_their_prefix_again(model, start_recurrent):
    """A hit inside a block takes more blocks for a while than none: those that it copies."""
    recurrent: Model = MODELS[model]
    block_size = recurrent.chunk_sizes[0] - 16
    shared = words(block_size + 356)
    asks = [Ask(shared + words(20, seed=seed), greedy(8)) for seed in (1, 2, 3)]
    engine = start_recurrent(
        {}, max_model_len=block_size + 544, num_gpu_blocks_override=recurrent.fewest_blocks
    )
    results = engine.run(asks)
    assert [result.num_cached_tokens for result in results] == [0, len(shared), len(shared)]
    engine.check_nothing_is_left()
