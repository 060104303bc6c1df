"""Several KV-cache groups in the real schedulers, and no model: what every pass reads is checked.

A request reads in each group exactly the tokens of its window, from blocks of that group, and its
answer depends on every token that was fed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from sgl_vllm.radix.snapshot import take_snapshot
from sgl_vllm.radix.tree import RadixTree
from tests.effort import by_turns, some_slow
from tests.engine.jobs import (
    cached_tokens,
    check,
    common_prefix,
    jump_counts,
    leave_copies_out,
    mixed_jobs,
    params,
    serve,
    serve_without_checks,
    wanted,
    with_continuations,
)
from tests.engine.late import MAX_MODEL_LEN, LateCore, Runner, V1Runner, V2Runner
from tools.engine_harness.kv_memory import WrongKvError
from tools.engine_harness.settings import MLA

LAYOUTS: dict[str, dict[str, Any]] = {
    "gemma 3": {"sliding_windows": (40, 40, 40)},
    "gpt-oss": {"sliding_windows": (24,)},
    "llama 4": {"attention_chunks": (32, 32)},
    "windows and chunks": {"sliding_windows": (9, 70), "attention_chunks": (24,)},
    "wide windows": {"sliding_windows": (200,)},
    "gemma 4": {"sliding_windows": (40, 40), "full_block_scale": 2},
    "blocks a fourth as long": {"sliding_windows": (9, 70), "full_block_scale": 4},
    "phi-4-mini": {"sliding_windows": (MAX_MODEL_LEN,), "full_attention": None},
    "a window beside one that never ends": {
        "sliding_windows": (24, MAX_MODEL_LEN),
        "full_attention": None,
    },
    "mla": {"sliding_windows": (24,), "full_attention": MLA},
}
QUICK = ("gemma 3", "windows and chunks", "gemma 4", "phi-4-mini")
SOME_SLOW = some_slow(LAYOUTS, QUICK)
RUNNERS = [(V1Runner, False), (V1Runner, True), (V2Runner, True)]
SHAPES = [
    # block size, blocks, at once, tokens a step, policy
    pytest.param((16, 80, 16, 48, "fcfs")),
    pytest.param((16, 900, 16, 512, "fcfs"), marks=pytest.mark.slow),
    pytest.param((32, 44, 16, 200, "priority"), marks=pytest.mark.slow),
]


def make_core(
    layout: str, runner: type[Runner] = V1Runner, is_async: bool = False, **more: Any
) -> LateCore:
    core = LateCore(runner=runner, async_scheduling=is_async, **LAYOUTS[layout], **more)
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


@pytest.fixture(scope="module")
def want():
    """Half of the jobs go on where another's answer ends."""
    jobs = mixed_jobs(40, seed=5)
    return with_continuations(jobs, wanted(jobs))


@pytest.mark.parametrize(
    ("layout", "shape", "runner", "is_async"), by_turns(SOME_SLOW, SHAPES, RUNNERS)
)
def test_every_request_gets_the_same_tokens(want, layout, runner, is_async, shape):
    jobs, answers = want
    block_size, num_blocks, at_once, max_tokens, policy = shape
    settings = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": at_once,
        "max_num_batched_tokens": max_tokens,
        "policy": policy,
    }
    for seed in (None, 1):
        core = make_core(layout, runner, is_async, **settings)
        disturb = random.Random(seed) if seed is not None else None
        aborted = serve(core, jobs, disturb)
        assert bool(aborted) == (disturb is not None)
        check(core.answers, answers, aborted)
        assert jump_counts(core).forced_tokens > 300
        counters = core.scheduler.sgl_vllm.stats().radix
        # In a small cache, there often is no room for the source of a copy.
        assert counters.partial_block_hits > (10 if num_blocks > 500 else 0)
        assert counters.hit_tokens > 1000


@pytest.mark.parametrize("layout", ["gpt-oss", "gemma 4"])
def test_without_the_copies_of_partial_blocks_a_pass_reads_what_is_not_there(
    want, monkeypatch, layout
):
    leave_copies_out(monkeypatch)
    jobs, _ = want
    with pytest.raises(WrongKvError):
        serve(make_core(layout, num_blocks=900, block_size=16), jobs)


@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_room_for_all_every_hit_is_the_longest_common_prefix(layout, block_size):
    """Chats, and forks at any token of a prompt or an answer."""
    rng = random.Random(block_size)
    core = make_core(layout, block_size=block_size, num_blocks=4000, max_num_batched_tokens=64)
    known: list[list[int]] = []
    for _ in range(60):
        earlier = rng.choice(known)[: rng.randrange(1, 150)] if known else []
        prompt = earlier + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 60))]
        longest = max((common_prefix(prompt, one) for one in known), default=0)
        got = cached_tokens(core, prompt, length := rng.choice([1, 8, 45]))
        assert got == min(longest, len(prompt) - 1)
        answer = core.answers[str(len(core.answers) - 1)].tokens
        assert len(answer) == length
        known.append(prompt + answer[:-1])  # the last token was never fed


@pytest.mark.parametrize("layout", ["gemma 3", "llama 4", "blocks a fourth as long"])
def test_a_hit_ends_where_a_snapshot_says_that_it_may(layout):
    """In a cache that is full: of most prefixes it keeps the windows at their ends."""
    rng = random.Random(7)
    core = make_core(layout, block_size=16, num_blocks=200, max_num_seqs=1)
    num_shorter = 0
    for _ in range(80):
        known = prefixes_and_hit_ends(core.scheduler.parts.radix.tree)
        tokens, ends = rng.choice(known) if known else ([], [])
        length = rng.randint(0, min(len(tokens), 150))
        expected = max((end for end in ends if end <= length), default=0)
        num_shorter += expected < length
        prompt = [*tokens[:length], *(rng.randrange(3000, 9000) for _ in range(100))]
        assert cached_tokens(core, prompt, 1) == expected
    assert 10 < num_shorter < 70


def prefixes_and_hit_ends(tree: RadixTree) -> list[tuple[list[int], list[int]]]:
    """For every node the tokens up to its end, and the lengths at which a hit may end in them."""
    known: list[tuple[list[int], list[int]]] = []
    for node in take_snapshot(tree, max_tokens=MAX_MODEL_LEN).nodes:
        assert node.tokens is not None and node.hit_ends is not None
        tokens, ends = known[node.parent] if node.parent is not None else ([], [])
        here = [
            len(tokens) + number
            for first, last in node.hit_ends.ranges
            for number in range(first, last + 1)
        ]
        known.append((tokens + node.tokens, ends + here))
    return known


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("runner", "is_async"), RUNNERS)
def test_the_longest_request_keeps_all_tokens_of_a_window_as_long(runner, is_async, block_size):
    core = make_core("phi-4-mini", runner, is_async, block_size=block_size, num_blocks=600)
    prompt = [10 + place % 900 for place in range(200)]
    assert cached_tokens(core, prompt, MAX_MODEL_LEN) == 0
    computed = [*prompt, *core.answers["0"].tokens[:-1]]
    assert len(computed) == MAX_MODEL_LEN - 1
    assert cached_tokens(core, computed) == MAX_MODEL_LEN - 2


def test_what_the_window_of_a_prompts_end_needs_outlives_what_is_before_it():
    """In a full cache, the middle of old prompts goes first, and their ends are still found."""
    core = make_core("gpt-oss", block_size=16, num_blocks=140)
    prompts = [[100 * number + 10 + place % 90 for place in range(200)] for number in range(6)]
    for prompt in prompts:  # 13 blocks of full attention each, and 13 of the windows
        cached_tokens(core, prompt)
    assert [cached_tokens(core, [*prompt, 7]) for prompt in prompts] == [200] * 6
    assert cached_tokens(core, [*prompts[0][:100], 7]) < 100


def test_an_error_in_the_tree_leaves_vllms_own_cache_to_serve(want, monkeypatch):
    """In the middle of everything, with windows that have moved on."""
    jobs, answers = want
    insert, calls = RadixTree.insert, 0

    def broken(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise RuntimeError("a bug")
        return insert(*args, **more)

    monkeypatch.setattr(RadixTree, "insert", broken)
    for layout in LAYOUTS:
        calls = 0
        core = LateCore(block_size=16, num_blocks=120, async_scheduling=False, **LAYOUTS[layout])
        serve_without_checks(core, jobs)
        check(core.answers, answers)
        assert core.scheduler.parts.radix.tree is None
        pool = core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == 120
        assert len(pool.cached_block_hash_to_block) > 0


def test_a_score_is_found_behind_a_prefix_in_windows():
    core = make_core("gemma 3", block_size=16)
    prompt = [10 + place % 900 for place in range(180)]
    whole: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 1}
    core.send("whole", prompt, params(**whole))
    core.finish()
    core.send("from 150", prompt, params(**whole, extra_args={"sgl_score_from": 150}))
    core.finish()
    scores = core.answers["whole"].scores
    assert scores is not None
    assert core.answers["from 150"].scores == scores[149:]
    assert core.scheduler.sgl_vllm.stats().radix.hit_tokens == 149
