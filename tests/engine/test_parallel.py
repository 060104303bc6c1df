"""Pipelines of two stages, and tensors in two parts: all parts are on, and the answers are stock's.

The workers are processes, each with a part of the model; vLLM's scheduler is in this one.
"""

from __future__ import annotations

import pytest

from tests.engine.engine import Ask, Engine, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_same_answers import mixed_requests
from tests.engine.test_select import scores, scoring
from tests.platforms.workers import WithBuffers

SETTINGS = {"block_size": 32, "num_gpu_blocks_override": 50, "max_num_batched_tokens": 128}


def start_parallel(start, plugin, **parallel: int) -> Engine:
    engine: Engine = start(
        plugin,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{WithBuffers.__module__}.{WithBuffers.__qualname__}",
        **parallel,
        **SETTINGS,
    )
    if parallel.get("pipeline_parallel_size", 1) > 1:
        engine.llm.collective_rpc("make_buffers")
    return engine


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_all_parts_are_on_and_every_request_gets_what_stock_gives(start, parallel):
    asks = mixed_requests(2000, count=32, seed=11)
    prefix = words(150, seed=5)
    ends = [Ask(prefix + words(4, seed), scoring()) for seed in range(4)]

    # A pipeline computes what one process computes; a sum of two parts is rounded differently.
    in_one = parallel == "pipeline_parallel_size"
    stock = start(None, **SETTINGS) if in_one else start_parallel(start, None, **{parallel: 2})
    with decoding_one_by_one(stock.scheduler):
        want = stock.tokens(asks)
    want_scores = [scores(one, 4) for one in stock.run(ends)]

    engine = start_parallel(start, {}, **{parallel: 2})
    assert set(engine.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    assert engine.scheduler.use_pp == in_one
    got = engine.tokens(asks)
    assert [index for index in range(len(asks)) if got[index] != want[index]] == []
    again = engine.tokens(asks)  # from the cache
    assert [index for index in range(len(asks)) if again[index] != want[index]] == []
    selected = engine.run([Ask(ask.prompt, scoring(150)) for ask in ends])
    assert [scores(one, 4) for one in selected] == [
        pytest.approx(expected, abs=1e-4) for expected in want_scores
    ]
    engine.check_nothing_is_left()
    counts = engine.scheduler.sgl_vllm.stats()
    assert counts.jump_forward.forced_tokens > 60 and counts.jump_forward.errors == 0
    assert counts.radix.partial_block_hits > 3
    assert counts.select.scored_requests == 4
