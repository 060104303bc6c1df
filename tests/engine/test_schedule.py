"""The order of admission on the real engine: counts of what had to be computed."""

from __future__ import annotations

import random

import pytest
from vllm import SamplingParams

from tests.engine.engine import Ask


def interleaved_groups(num_groups: int, per_group: int) -> list[Ask]:
    """Requests of many groups in turn; those of a group share 384 tokens."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(10, 2000) for _ in range(384)] for _ in range(num_groups)]
    return [
        Ask(
            prefix + [rng.randrange(10, 2000) for _ in range(20)],
            SamplingParams(temperature=0, max_tokens=4),
        )
        for _ in range(per_group)
        for prefix in prefixes
    ]


@pytest.mark.parametrize("schedule", [False, True])
def test_with_a_tight_cache_the_order_decides_what_is_computed(start, schedule):
    engine = start(
        plugin={"schedule": schedule}, block_size=32, num_gpu_blocks_override=70, max_num_seqs=4
    )
    asks = interleaved_groups(num_groups=8, per_group=6)
    unique_tokens = 8 * 384 + len(asks) * 20
    outputs = engine.run(asks)
    assert all(len(out.outputs[0].token_ids) for out in outputs)
    prompt_tokens_computed = engine.computed_tokens - sum(
        len(out.outputs[0].token_ids) - 1 for out in outputs
    )
    if schedule:
        assert prompt_tokens_computed < 1.6 * unique_tokens
    else:
        assert prompt_tokens_computed > 4 * unique_tokens
    engine.check_nothing_is_left()
