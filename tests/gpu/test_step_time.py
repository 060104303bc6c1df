"""The plugin costs a step next to nothing where it cannot help, and asynchronous scheduling still
overlaps: random prompts, nothing shared, alternating with stock in separate engines."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from vllm import SamplingParams

from tests.engine.engine import Ask, Engine
from tests.gpu.configuration import on_cpu

LIMIT = 1.01
TURNS = 3
ROUNDS = 2 if on_cpu() else 12
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = (8, 64, 8) if on_cpu() else (64, 256, 128)


def ms_per_step(engine: Engine, rng: random.Random) -> float:
    """The median over rounds; the first is not counted."""
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    times = []
    for _ in range(ROUNDS + 1):
        asks = [
            Ask([rng.randrange(10, 2000) for _ in range(PROMPT_TOKENS)], params)
            for _ in range(NUM_REQUESTS)
        ]
        assert engine.llm.reset_prefix_cache()
        engine.reset_counts()
        begun = time.perf_counter()
        engine.run(asks)
        times.append((time.perf_counter() - begun) / engine.forward_passes)
        engine.check_nothing_is_left()
    return 1e3 * statistics.median(times[1:])


def test_a_step_without_sharing_takes_as_long_as_stocks(start: Any, record_property: Any) -> None:
    arguments = {
        "block_size": 32,
        "max_num_seqs": NUM_REQUESTS,
        "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS + 1,
    }
    rng = random.Random(0)
    stock, ours = [], []
    for _ in range(TURNS):
        stock.append(ms_per_step(start(None, **arguments), rng))
        ours.append(ms_per_step(start({}, **arguments), rng))
    ratio = min(ours) / min(stock)
    print(f"\nms per step: stock {stock}, plugin {ours}; best to best {ratio:.4f}")
    record_property("step time, plugin to stock", f"{ratio:.4f}")
    # A CPU that others use says nothing of a percent: there, only that the test itself works.
    assert ratio <= (3 if on_cpu() else LIMIT)
