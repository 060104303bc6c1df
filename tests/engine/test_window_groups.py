"""Several KV-cache groups in the real schedulers, and no model: what every pass reads is checked.

A request reads in each group exactly the tokens of its window, from blocks of that group, and its
answer depends on every token that was fed. With speculation, a draft that is rejected moves a
request back, so the window of what follows begins earlier, too.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.engine_settings import MLA
from sgl_vllm.radix.snapshot import take_snapshot
from sgl_vllm.radix.tree import RadixTree
from tests.effort import by_turns, examples, some_nightly
from tests.engine.drafters import MASKS_AFTER_DRAFTS
from tests.engine.jobs import (
    Job,
    cached_tokens,
    check,
    common_prefix,
    jump_counts,
    mixed_jobs,
    params,
    serve,
    wanted,
    with_continuations,
)
from tests.engine.late import MAX_MODEL_LEN, Answer, LateCore
from tests.engine.late_runners import Drafter, Runner, V1Runner, V2Runner

LAYOUTS: dict[str, dict[str, Any]] = {
    "one group": {},
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
SOME_SLOW = some_nightly([*LAYOUTS][1:], QUICK)
RUNNERS = [(V1Runner, False), (V1Runner, True), (V2Runner, True)]
SHAPES = [
    # block size, blocks, at once, tokens a step, policy
    pytest.param((16, 80, 16, 48, "fcfs")),
    pytest.param((16, 900, 16, 512, "fcfs"), marks=pytest.mark.slow),
    pytest.param((32, 44, 16, 200, "priority"), marks=pytest.mark.slow),
]


METHODS: list[tuple[str, type[Runner], bool]] = [
    ("ngram", V1Runner, False),
    ("ngram", V2Runner, False),
    ("ngram_gpu", V2Runner, True),
    ("eagle", V2Runner, True),
    ("eagle", V1Runner, False),
]
WITH_DRAFTS = ("one group", "gpt-oss", "windows and chunks", "gemma 4")
LOOKAHEAD = {None: 0, "ngram": 0, "ngram_gpu": 0, "eagle": 1}
NO_METHOD = (None, V1Runner, False)
NUM_DRAFTS = 4
Want = tuple[list[Job], dict[str, Answer]]


def make_core(
    layout: str,
    runner: type[Runner] = V1Runner,
    is_async: bool = False,
    *,
    method: str | None = None,
    drafter: Drafter | None = None,
    **more: Any,
) -> LateCore:
    if method is not None:
        more |= {"speculation": method, "drafter": drafter or Drafter({}, NUM_DRAFTS)}
    core = LateCore(runner=runner, async_scheduling=is_async, **{**LAYOUTS[layout], **more})
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


def drafter_of(want: Want, num_drafts: int = NUM_DRAFTS, seed: int = 0) -> Drafter:
    """Drafts what the requests get, with mistakes."""
    jobs, answers = want
    whole = {job.name: [*job.prompt, *answers[job.name].tokens] for job in jobs}
    return Drafter(whole, num_drafts, seed)


@pytest.fixture(scope="module")
def want() -> Want:
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


@pytest.mark.parametrize("num_blocks", [150, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
@pytest.mark.parametrize("layout", some_nightly(WITH_DRAFTS, ("gpt-oss", "gemma 4")))
def test_so_it_does_with_drafts(want, layout, method, runner, is_async, num_blocks):
    jobs, answers = want
    settings = {"block_size": 8, "max_num_batched_tokens": 100, "num_blocks": num_blocks}
    for seed in (None, 1):
        drafts = {"method": method, "drafter": drafter_of(want)}
        core = make_core(layout, runner, is_async, **drafts, **settings)
        aborted = serve(core, jobs, random.Random(seed) if seed is not None else None)
        check(core.answers, answers, aborted)
        assert core.runner.num_accepted > 100 and core.runner.num_rejected > 100
        assert jump_counts(core).forced_tokens > 300
        assert core.scheduler.sgl_vllm.stats().radix.hit_tokens > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(16)))
def test_random_requests_with_drafts_in_a_cache_of_random_size(seed):
    rng = random.Random(seed)
    jobs = mixed_jobs(24, seed=100 + seed)
    want = jobs, answers = with_continuations(jobs, wanted(jobs))
    layout = WITH_DRAFTS[seed % len(WITH_DRAFTS)]
    num_accepted = num_rejected = 0
    methods = [one for one in METHODS if MASKS_AFTER_DRAFTS or not one[2]]
    for method, runner, is_async in methods:
        drafter = drafter_of(want, rng.choice([1, 2, 5]), seed)
        settings: dict[str, Any] = {
            "block_size": rng.choice([4, 8, 16]),
            "max_num_batched_tokens": rng.choice([40, 100, 400]),
            "policy": rng.choice(["fcfs", "priority"]),
        }
        groups = LateCore(**LAYOUTS[layout], **settings).scheduler.kv_cache_manager.groups
        longest = groups.max_blocks(MAX_MODEL_LEN + 10)  # with drafts
        settings["num_blocks"] = round(rng.choice([1.2, 2, 5]) * longest)
        core = make_core(layout, runner, is_async, method=method, drafter=drafter, **settings)
        aborted = serve(core, jobs, rng)
        check(core.answers, answers, aborted)
        num_accepted += core.runner.num_accepted
        num_rejected += core.runner.num_rejected
    assert num_accepted > (100 if len(methods) == len(METHODS) else 50) and num_rejected > 10


HITS = [
    *((layout, *NO_METHOD, 16) for layout in LAYOUTS),
    *(pytest.param(layout, *NO_METHOD, 32, marks=pytest.mark.slow) for layout in LAYOUTS),
    *((layout, *method, 8) for layout in WITH_DRAFTS for method in METHODS),
]


@pytest.mark.parametrize(("layout", "method", "runner", "is_async", "block_size"), HITS)
def test_with_room_for_all_a_hit_loses_only_what_a_drafter_has_read_ahead(
    layout, method, runner, is_async, block_size
):
    """Of the longest common prefix. There are chats, and forks at any token of a prompt or an
    answer."""
    rng = random.Random(block_size)
    settings = {"block_size": block_size, "num_blocks": 4000, "max_num_batched_tokens": 64}
    core = make_core(layout, runner, is_async, method=method, **settings)
    known: list[list[int]] = []
    for _ in range(50):
        earlier = rng.choice(known)[: rng.randrange(1, 150)] if known else []
        prompt = earlier + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 60))]
        longest = max((common_prefix(prompt, one) for one in known), default=0)
        got = cached_tokens(core, prompt, length := rng.choice([1, 8, 45]))
        assert got == max(0, min(longest - LOOKAHEAD[method], len(prompt) - 1))
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
    for node in take_snapshot(tree, max_tokens=MAX_MODEL_LEN)["nodes"]:
        tokens, ends = known[node["parent"]] if node["parent"] is not None else ([], [])
        here = [
            len(tokens) + number
            for first, last in node["hit_ends"]["ranges"]
            for number in range(first, last + 1)
        ]
        known.append((tokens + node["tokens"], ends + here))
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


@pytest.mark.parametrize(
    ("window", "block_size", "num_blocks", "method", "runner", "is_async"),
    [(24, 16, 140, *NO_METHOD), *((9, 8, 195, *method) for method in METHODS)],
)
def test_the_window_of_a_prompts_end_outlives_what_is_before_it(
    window, block_size, num_blocks, method, runner, is_async
):
    """In a full cache, the middle of old prompts goes first, and their ends are still found. With
    drafts, the window of what follows begins with a block, and that of a hit one token shorter does
    not."""
    sizes = {"sliding_windows": (window,), "block_size": block_size, "num_blocks": num_blocks}
    core = make_core("one group", runner, is_async, method=method, **sizes)
    prompts = [[100 * number + 10 + place % 90 for place in range(200)] for number in range(6)]
    for prompt in prompts:  # as many blocks of full attention as of the windows
        cached_tokens(core, prompt)
    assert [cached_tokens(core, prompt) for prompt in prompts] == [199] * 6
    more = 200 - LOOKAHEAD[method]
    assert [cached_tokens(core, [*prompt, 7]) for prompt in prompts] == [more] * 6
    assert cached_tokens(core, [*prompts[0][:100], 7]) < 100 - LOOKAHEAD[method]


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
