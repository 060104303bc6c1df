"""Rule 4 and exact hits on models whose layers read different parts of what precedes a token:
sliding windows, or chunks, beside full attention. The models are small and random."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.effort import requests, some_slow
from tests.engine.engine import Ask, greedy, tokens_of, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import (
    REFERENCE,
    STOCK_WITHOUT_CACHE,
    References,
    Setting,
    play,
)
from tests.engine.programs import Program, random_program
from tests.engine.ties import check_answers
from tests.engine.window_models import CONFIGS, Model

TINY_CACHE = Setting({}, max_num_batched_tokens=96)
SETTINGS = {
    "tiny cache, prefill in chunks": TINY_CACHE,
    "tiny cache, by priority": Setting(
        {"schedule_max_overtakes": 1}, max_num_batched_tokens=96, policy="priority"
    ),
    "block 64": Setting({}, block_size=64, num_blocks=60, max_num_batched_tokens=256),
    "room for all": Setting({}, num_blocks=2000),
}
SLOW = [pytest.mark.slow]


@pytest.fixture(scope="module", params=some_slow(CONFIGS, ["gemma3"]))
def model(request, start, tmp_path_factory) -> Model:
    return Model.written(request.param, tmp_path_factory.mktemp(request.param), start)


def chats_and_forks(seed: int, count: int) -> list[Ask]:
    """Some go on where an earlier prompt ends, and some fork inside one."""
    rng = random.Random(seed)
    prompts = [words(330, seed)]
    while len(prompts) < count:
        earlier = rng.choice(prompts)
        length = len(earlier) if rng.random() < 0.4 else rng.randrange(1, len(earlier))
        if length < 700:
            more = words(rng.randrange(1, 90), seed=1000 * seed + len(prompts))
            prompts.append(earlier[:length] + more)
    return [Ask(prompt, greedy(rng.randrange(1, 10))) for prompt in prompts]


def common_prefix(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("block_size", [32, pytest.param(128, marks=SLOW)])
def test_every_hit_is_the_longest_common_prefix_and_changes_no_answer(model, block_size):
    if model.name == "llama4" and block_size > 64:
        pytest.skip("vLLM takes chunks of whole blocks only")
    asks = chats_and_forks(seed=3, count=24)
    stock = model.start(enable_prefix_caching=False, block_size=block_size)
    want = [tokens_of(stock.run([ask])[0]) for ask in asks]

    engine = model.start({}, block_size=block_size, num_gpu_blocks_override=3000)
    assert engine.scheduler.parts.states()["radix"] == "on"
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert {one.block_size for one in managers} == (
        {block_size, 2 * block_size} if model.name == "gemma4" else {block_size}
    )
    known: list[list[int]] = []
    for ask, tokens in zip(asks, want, strict=True):
        (result,) = engine.run([ask])
        longest = max((common_prefix(ask.prompt, one) for one in known), default=0)
        assert result.num_cached_tokens == min(longest, len(ask.prompt) - 1)
        assert tokens_of(result) == tokens
        known.append(ask.prompt + tokens[:-1])  # the last token was never fed
    engine.check_nothing_is_left()


def test_without_the_copies_of_partial_blocks_answers_are_wrong(model):
    asks = chats_and_forks(seed=3, count=12)
    engine = model.start({}, num_gpu_blocks_override=3000)
    want = [tokens_of(engine.run([ask])[0]) for ask in asks]
    assert engine.llm.reset_prefix_cache()
    manager = engine.scheduler.kv_cache_manager
    take = manager.take_kv_cache_block_copies
    manager.take_kv_cache_block_copies = lambda: ([], take()[1])
    got = [tokens_of(engine.run([ask])[0]) for ask in asks]
    assert sum(a != b for a, b in zip(got, want, strict=True)) >= 3


@pytest.fixture(scope="module")
def program() -> Program:
    return random_program(seed=30, num_calls=requests(45))


@pytest.fixture(scope="module")
def references(model, program) -> References:
    engine = model.start_for(REFERENCE)
    with decoding_one_by_one(engine.scheduler):
        narrowed = play(engine, program, None, give_up=False)
    stock = play(engine, program, narrowed.prompts, give_up=False)
    return References(narrowed, stock)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=[] if setting is TINY_CACHE else SLOW)
        for name, setting in SETTINGS.items()
    ],
)
def test_every_request_of_a_random_program_gets_stocks_answer(model, program, references, setting):
    must_preempt = setting is TINY_CACHE and requests(4) == 4
    setting = model.adapted(setting)
    engine = model.start_for(setting)
    played = play(engine, program, references.narrowed.prompts)
    assert engine.scheduler.parts.states()["radix"] == "on"
    counts = played.counts
    assert counts["partial hits"] > requests(10)
    assert counts["forced tokens"] > requests(40) or not setting.is_canonical
    assert counts["select scores"] > 0 and counts["aborts"] > 0
    assert counts["preemptions"] > 0 or not must_preempt
    check_answers(model.start, program, references.expected_by(setting, program), played)


def test_requests_that_outgrow_the_cache_are_preempted_and_get_stocks_answers(model, monkeypatch):
    shared = words(40, seed=5)
    asks = [Ask(shared + words(20, seed=50 + i), greedy(120)) for i in range(10)]
    stock = model.start(enable_prefix_caching=False)
    want = [tokens_of(stock.run([ask])[0]) for ask in asks]

    engine = model.start_for(model.adapted(TINY_CACHE))
    schedule = engine.scheduler.schedule
    preempted: list[str] = []

    def recorded(*args: Any) -> SchedulerOutput:
        scheduled = schedule(*args)
        preempted.extend(scheduled.preempted_req_ids or ())
        return scheduled

    monkeypatch.setattr(engine.scheduler, "schedule", recorded)
    assert [tokens_of(result) for result in engine.run(asks)] == want
    assert preempted
    engine.check_nothing_is_left()


def test_an_error_in_the_tree_leaves_vllms_own_cache_to_serve(model, monkeypatch):
    from sgl_vllm.radix.tree import RadixTree

    prompt = words(300)
    want = tokens_of(model.start_for(STOCK_WITHOUT_CACHE).run([Ask(prompt, greedy(20))])[0])
    engine = model.start({}, num_gpu_blocks_override=3000)

    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(RadixTree, "insert", broken)
    results = [engine.run([Ask(prompt, greedy(20))])[0] for _ in range(3)]
    assert [tokens_of(result) for result in results] == [want] * 3
    whole_blocks = 300 - 300 % engine.scheduler.block_size
    assert results[-1].num_cached_tokens == whole_blocks
    assert "switched off by an error" in engine.scheduler.sgl_vllm.stats().parts["radix"]
