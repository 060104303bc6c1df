"""KV events of models with several KV-cache groups: what a router may conclude from them.

`test_groups.py` compares them with the tree all along.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from sgl_vllm.radix.tree import RadixTree
from tests.engine.event_subscriber import Block, Subscriber
from tests.engine.jobs import cached_tokens, params, serve_without_checks
from tests.engine.late import LateCore

LAYOUTS: dict[str, dict[str, Any]] = {
    "one group": {},
    "gpt-oss": {"sliding_windows": (24,)},
    "windows and chunks": {"sliding_windows": (9, 70), "attention_chunks": (24,)},
    "gemma 4": {"sliding_windows": (40, 40), "full_block_scale": 2},
    "windows of two lengths": {"sliding_windows": (24, 70), "full_attention": None},
    "recurrent and a window": {"num_recurrent_groups": 1, "sliding_windows": (40,)},
}


def make_core(layout: str, num_blocks: int) -> LateCore:
    core = LateCore(
        async_scheduling=False,
        kv_events=True,
        max_num_batched_tokens=100,
        block_size=8,
        num_blocks=num_blocks,
        **LAYOUTS[layout],
    )
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_finds_at_least_what_the_events_promise(layout):
    """What a router concludes: all blocks of full attention, those inside each window, and a state
    at the end."""
    core = make_core(layout, num_blocks=240)
    subscriber = Subscriber(core.scheduler)
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    rng = random.Random(2)
    prompts: list[list[int]] = [[rng.randrange(10, 2000) for _ in range(90)]]
    num_promised = 0
    for _ in range(30):
        subscriber.read_all()
        earlier = rng.choice(prompts)[: rng.randrange(1, 160)]
        prompt = [*earlier, *(rng.randrange(10, 2000) for _ in range(rng.randrange(1, 40)))]
        promised = promised_tokens(subscriber.known, managers, prompt)
        assert cached_tokens(core, prompt, length=5) >= promised
        prompts.append([*prompt, *core.answers[str(len(core.answers) - 1)].tokens])
        num_promised += promised
    assert num_promised > 250
    assert set(subscriber.kinds) == set(range(len(managers)))


def promised_tokens(known: set[Block], managers: Any, prompt: list[int]) -> int:
    """The longest prefix of whole blocks of all groups of which each has what it needs."""
    step = math.lcm(*(manager.block_size for manager in managers))
    for length in range((len(prompt) - 1) // step * step, 0, -step):
        if all(
            Block(group, None, tuple(prompt[:end])) in known
            for group, manager in enumerate(managers)
            for end in range(length, manager.get_num_skipped_tokens(length), -manager.block_size)
        ):
            return length
    return 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_report_mode_full_announces_again_what_a_hit_reads(layout):
    core = make_core(layout, num_blocks=900)
    subscriber = Subscriber(core.scheduler)
    prompt = [10 + place % 900 for place in range(100)]
    cached_tokens(core, prompt)
    subscriber.read_all()
    first = set(subscriber.known)
    subscriber.known.clear()
    again = params(max_tokens=1, extra_args={"kv_cache_report_mode": "full"})
    core.send("again", [*prompt[:96], 7, 8], again)
    core.advance()
    subscriber.read_all()
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    num_cached = core.scheduler.sgl_vllm.stats().radix.hit_tokens
    assert num_cached == 96
    for group, manager in enumerate(managers):
        size, num_skipped = manager.block_size, manager.get_num_skipped_tokens(96)
        ends = range((num_skipped // size + 1) * size, 97, size)
        wanted_blocks = {Block(group, None, tuple(prompt[:end])) for end in ends}
        assert {one for one in subscriber.known if one.group == group} == wanted_blocks
        assert wanted_blocks <= first
    core.finish()


def test_a_flush_and_an_error_in_the_tree_are_announced(monkeypatch):
    core = make_core("gpt-oss", num_blocks=300)
    subscriber = Subscriber(core.scheduler)
    prompt = [10 + place % 900 for place in range(100)]
    cached_tokens(core, prompt)
    subscriber.read_all()
    assert subscriber.known
    assert core.scheduler.reset_prefix_cache()
    subscriber.read_all()
    assert not subscriber.known
    cached_tokens(core, prompt)

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(RadixTree, "insert", broken)
    core.send("broken", [*prompt, *prompt[:50]], params(max_tokens=20))
    serve_without_checks(core, [])
    subscriber.read_all()
    hashes = {block.block_hash for block in core.scheduler.kv_cache_manager.block_pool.blocks}
    assert len(subscriber.known) == len(hashes - {None}) > 0
