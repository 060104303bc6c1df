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


def test_without_a_common_prefix_the_order_is_first_come_first_served(start):
    engine = start(plugin={}, max_num_seqs=2)
    rng = random.Random(1)
    asks = [
        Ask(
            [rng.randrange(10, 2000) for _ in range(40)],
            SamplingParams(temperature=0, max_tokens=3),
        )
        for _ in range(12)
    ]
    engine.run(asks)
    counters = engine.scheduler.sgl_vllm.stats().schedule
    assert counters.ordered_steps > 0
    assert counters.overtakes == 0


@pytest.mark.parametrize("schedule", [False, True])
def test_of_equal_prompts_the_first_goes_ahead_and_the_others_share_all_of_it(start, schedule):
    """Side by side they would share its one full block."""
    engine = start(plugin={"schedule": schedule}, block_size=128, max_num_batched_tokens=2048)
    rng = random.Random(2)
    prompt = [rng.randrange(10, 2000) for _ in range(251)]
    ask = Ask(prompt, SamplingParams(temperature=0, max_tokens=1))
    outputs = engine.run([ask] * 4)
    assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1
    assert engine.computed_tokens == (251 + 3 * 1 if schedule else 251 + 3 * (251 - 128))
    assert engine.forward_passes == (2 if schedule else 1)
    engine.check_nothing_is_left()
