"""Pipelines of two stages, and tensors in two parts: all parts are on, and the answers are stock's.

The workers are processes, each with a part of the model; vLLM's scheduler is in this one.
"""

from __future__ import annotations

import pytest

from tests.engine.engine import Engine
from tests.engine.play import REFERENCE, Setting, differences, play, references_on
from tests.engine.programs import random_program
from tests.platforms.workers import WithBuffers


def start_parallel(start, setting: Setting, **parallel: int) -> Engine:
    engine: Engine = start(
        setting.plugin,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{WithBuffers.__module__}.{WithBuffers.__qualname__}",
        **parallel,
        **setting.engine_args,
    )
    if parallel.get("pipeline_parallel_size", 1) > 1:
        engine.llm.collective_rpc("make_buffers")
    return engine


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_all_parts_are_on_and_every_request_gets_what_stock_gives(start, parallel):
    program = random_program(14, 40)
    # A pipeline computes what one process computes; a sum of two parts is rounded differently.
    in_one = parallel == "pipeline_parallel_size"
    of_stock = {} if in_one else {parallel: 2}
    known = references_on(start_parallel(start, REFERENCE, **of_stock), program)

    setting = Setting({}, num_blocks=50, max_num_batched_tokens=128)
    engine = start_parallel(start, setting, **{parallel: 2})
    assert set(engine.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    assert engine.scheduler.use_pp == in_one
    for _ in range(2):  # the second time from the cache
        played = play(engine, program, known.narrowed.prompts)
        assert list(differences(program, known.narrowed, played)) == []
        engine.check_nothing_is_left()
    for what in ("forced tokens", "partial hits", "select scores"):
        assert played.counts[what] > 0, what
