"""KV events of models with several KV-cache groups tell, for each group, which whole blocks the
tree holds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from sgl_vllm.radix.tree import RadixTree
from tests.engine.event_subscriber import Block, Subscriber, whole_blocks
from tests.engine.jobs import (
    Job,
    cached_tokens,
    check,
    mixed_jobs,
    params,
    serve,
    serve_without_checks,
    wanted,
    with_continuations,
)
from tests.engine.late import Answer, LateCore
from tests.engine.late_runners import Runner, V1Runner, V2Runner

LAYOUTS: dict[str, dict[str, Any]] = {
    "one group": {},
    "gpt-oss": {"sliding_windows": (24,)},
    "windows and chunks": {"sliding_windows": (9, 70), "attention_chunks": (24,)},
    "gemma 4": {"sliding_windows": (40, 40), "full_block_scale": 2},
    "qwen3-next": {"num_recurrent_groups": 3},
    "recurrent and a window": {"num_recurrent_groups": 1, "sliding_windows": (40,)},
}
RUNNERS = [(V1Runner, False), (V1Runner, True), (V2Runner, True)]


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    jobs = mixed_jobs(30, seed=8)
    return with_continuations(jobs, wanted(jobs))


@pytest.mark.parametrize("num_blocks", [90, pytest.param(900, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("runner", "is_async"), RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_subscriber_knows_the_whole_blocks_of_every_group_after_every_step(
    want, layout, runner, is_async, num_blocks
):
    jobs, answers = want
    core: Any = make_core(layout, runner, is_async, num_blocks=num_blocks)
    subscriber = Subscriber(core.scheduler)
    advance, num_checks = core.advance, 0

    def advance_and_check() -> None:
        nonlocal num_checks
        advance()
        subscriber.read_all()
        assert subscriber.known == whole_blocks(core.scheduler)
        num_checks += bool(subscriber.known)

    core.advance = advance_and_check
    aborted = serve(core, jobs, random.Random(1))
    check(core.answers, answers, aborted)
    assert num_checks > 50
    assert core.scheduler.sgl_vllm.stats().evictions.evicted_blocks > 100 or num_blocks > 500


def make_core(
    layout: str, runner: type[Runner] = V1Runner, is_async: bool = False, **more: Any
) -> LateCore:
    core = LateCore(
        runner=runner,
        async_scheduling=is_async,
        kv_events=True,
        max_num_batched_tokens=100,
        **{"block_size": 8, **LAYOUTS[layout], **more},
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
    for _ in range(60):
        subscriber.read_all()
        earlier = rng.choice(prompts)[: rng.randrange(1, 160)]
        prompt = [*earlier, *(rng.randrange(10, 2000) for _ in range(rng.randrange(1, 40)))]
        promised = promised_tokens(subscriber.known, managers, prompt)
        assert cached_tokens(core, prompt, length=5) >= promised
        prompts.append([*prompt, *core.answers[str(len(core.answers) - 1)].tokens])
        num_promised += promised
    assert num_promised > 600
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
