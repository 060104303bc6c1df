"""Speculative decoding with several KV-cache groups in the real schedulers, and no model: what each
pass reads is checked, after drafts that were right, and after drafts that were wrong.

A draft that is rejected moves a request back, so the window of what follows begins earlier, too.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.effort import examples, some_slow
from tests.engine.drafters import MASKS_AFTER_DRAFTS
from tests.engine.jobs import (
    Job,
    cached_tokens,
    check,
    common_prefix,
    jump_counts,
    leave_copies_out,
    mixed_jobs,
    params,
    serve,
    wanted,
    with_continuations,
)
from tests.engine.late import MAX_MODEL_LEN, Answer, Drafter, LateCore, Runner, V1Runner, V2Runner
from tools.engine_harness.kv_memory import WrongKvError

LAYOUTS: dict[str, dict[str, Any]] = {
    "one group": {},
    "gpt-oss": {"sliding_windows": (24,)},
    "windows and chunks": {"sliding_windows": (9, 70), "attention_chunks": (24,)},
    "gemma 4": {"sliding_windows": (40, 40), "full_block_scale": 2},
}
QUICK = ("gpt-oss", "gemma 4")
SOME_SLOW = some_slow(LAYOUTS, QUICK)
METHODS: list[tuple[str, type[Runner], bool]] = [
    ("ngram", V1Runner, False),
    ("ngram", V2Runner, False),
    ("ngram_gpu", V2Runner, True),
    ("eagle", V2Runner, True),
    ("eagle", V1Runner, False),
]
LOOKAHEAD = {"ngram": 0, "ngram_gpu": 0, "eagle": 1}
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    jobs = mixed_jobs(40, seed=5)
    return with_continuations(jobs, wanted(jobs))


def whole(jobs: list[Job], answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {job.name: [*job.prompt, *answers[job.name].tokens] for job in jobs}


def make_core(
    layout: str,
    method: str,
    runner: type[Runner],
    is_async: bool,
    drafter: Drafter,
    **more: Any,
) -> LateCore:
    core = LateCore(
        runner=runner,
        async_scheduling=is_async,
        speculation=method,
        drafter=drafter,
        **{"block_size": 8, "max_num_batched_tokens": 100, **LAYOUTS[layout], **more},
    )
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


@pytest.mark.parametrize("num_blocks", [150, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
@pytest.mark.parametrize("layout", SOME_SLOW)
def test_every_request_gets_the_same_tokens(want, layout, method, runner, is_async, num_blocks):
    jobs, answers = want
    for seed in (None, 1):
        drafter = Drafter(whole(jobs, answers), NUM_DRAFTS)
        core = make_core(layout, method, runner, is_async, drafter, num_blocks=num_blocks)
        disturb = random.Random(seed) if seed is not None else None
        aborted = serve(core, jobs, disturb)
        check(core.answers, answers, aborted)
        assert core.runner.num_accepted > 100 and core.runner.num_rejected > 100
        assert jump_counts(core).forced_tokens > 300
        assert core.scheduler.sgl_vllm.stats().radix.hit_tokens > 1000


@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hit_loses_only_what_the_drafter_has_read_ahead(layout, method, runner, is_async):
    """Chats, and forks at any token of a prompt or an answer."""
    rng = random.Random(3)
    core = make_core(layout, method, runner, is_async, Drafter({}, NUM_DRAFTS), num_blocks=4000)
    known: list[list[int]] = []
    for number in range(40):
        earlier = rng.choice(known)[: rng.randrange(1, 150)] if known else []
        prompt = earlier + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 60))]
        counters = core.scheduler.sgl_vllm.stats().radix
        core.send(str(number), prompt, params(max_tokens=30, ignore_eos=True))
        core.finish()
        hit = core.scheduler.sgl_vllm.stats().radix.hit_tokens - counters.hit_tokens
        longest = max((common_prefix(prompt, one) for one in known), default=0)
        assert hit == max(0, min(longest - LOOKAHEAD[method], len(prompt) - 1))
        known.append(prompt + core.answers[str(number)].tokens[:-1])  # the last was never fed


@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
def test_the_window_of_a_hit_one_token_short_outlives_what_is_before_it(method, runner, is_async):
    """In a full cache. The window of what follows begins with a block, the one before that does
    not."""
    drafter = Drafter({}, NUM_DRAFTS)
    settings: dict[str, Any] = {"sliding_windows": (9,), "num_blocks": 195}
    core = make_core("one group", method, runner, is_async, drafter, **settings)
    prompts = [[100 * number + 10 + place % 90 for place in range(200)] for number in range(6)]
    for prompt in prompts:  # 25 blocks of full attention each, and 25 of the windows
        cached_tokens(core, prompt)
    assert [cached_tokens(core, prompt) for prompt in prompts] == [199] * 6
    more = 200 - LOOKAHEAD[method]
    assert [cached_tokens(core, [*prompt, 7]) for prompt in prompts] == [more] * 6
    assert cached_tokens(core, [*prompts[0][:100], 7]) < 100 - LOOKAHEAD[method]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(16)))
def test_random_requests_in_a_cache_of_random_size(seed):
    rng = random.Random(seed)
    jobs = mixed_jobs(24, seed=100 + seed)
    jobs, answers = with_continuations(jobs, wanted(jobs))
    layout = [*LAYOUTS][seed % len(LAYOUTS)]
    num_accepted = num_rejected = 0
    methods = [one for one in METHODS if MASKS_AFTER_DRAFTS or not one[2]]
    for method, runner, is_async in methods:
        drafter = Drafter(whole(jobs, answers), rng.choice([1, 2, 5]), seed)
        settings: dict[str, Any] = {
            "block_size": rng.choice([4, 8, 16]),
            "max_num_batched_tokens": rng.choice([40, 100, 400]),
            "policy": rng.choice(["fcfs", "priority"]),
        }
        groups = LateCore(**LAYOUTS[layout], **settings).scheduler.kv_cache_manager.groups
        longest = groups.max_blocks(MAX_MODEL_LEN + 10)  # with drafts
        settings["num_blocks"] = round(rng.choice([1.2, 2, 5]) * longest)
        core = make_core(layout, method, runner, is_async, drafter, **settings)
        aborted = serve(core, jobs, rng)
        check(core.answers, answers, aborted)
        num_accepted += core.runner.num_accepted
        num_rejected += core.runner.num_rejected
    assert num_accepted > (100 if len(methods) == len(METHODS) else 50) and num_rejected > 10


@pytest.mark.parametrize("layout", ["gpt-oss", "gemma 4"])
def test_without_the_copies_of_partial_blocks_a_pass_reads_what_is_not_there(
    want, monkeypatch, layout
):
    leave_copies_out(monkeypatch)
    jobs, answers = want
    drafter = Drafter(whole(jobs, answers), NUM_DRAFTS)
    with pytest.raises(WrongKvError):
        serve(make_core(layout, "eagle", V2Runner, True, drafter, num_blocks=1500), jobs)
