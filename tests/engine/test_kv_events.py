"""KV events, as a router outside would follow them, tell exactly what the tree holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.routing.router import PrefixRouter
from tests.engine.engine import Ask, Engine, greedy, words

BLOCK = 32


class Router:
    """Stands for vLLM's event publisher, and for its subscriber: the set of known blocks."""

    def __init__(self) -> None:
        self.known: set = set()
        self.listeners: list = []
        self.stored: list[BlockStored] = []

    def publish(self, batch) -> None:
        for event in batch.events:
            self.apply(event)

    def apply(self, event) -> None:
        for listener in self.listeners:
            listener(event)
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
        elif isinstance(event, BlockRemoved):
            assert self.known.issuperset(event.block_hashes), "an unknown block is removed"
            self.known.difference_update(event.block_hashes)
        else:
            assert isinstance(event, BlockStored)
            assert event.block_size == BLOCK
            assert len(event.token_ids) == BLOCK * len(event.block_hashes)
            parent = event.parent_block_hash
            assert parent is None or parent in self.known, "a block continues an unknown one"
            self.known.update(event.block_hashes)
            self.stored.append(event)

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return start({}, kv_events_config=events, num_gpu_blocks_override=24, max_model_len=512)


@pytest.fixture
def router(engine, monkeypatch) -> Router:
    assert engine.llm.reset_prefix_cache()
    engine.scheduler.kv_cache_manager.take_events()
    router = Router()
    monkeypatch.setattr(engine.scheduler, "kv_event_publisher", router)
    return router


def check(engine: Engine, router: Router) -> None:
    """At idle: the router knows every whole block of the tree, and nothing else."""
    pool = engine.scheduler.parts.radix.pool
    pool.check_invariants()
    for event in engine.scheduler.kv_cache_manager.take_events():
        router.apply(event)
    whole = [
        block_id
        for node in pool.tree.nodes()
        for block_id in node.block_ids[: node.end // BLOCK - node.start // BLOCK]
    ]
    hashes = {
        maybe_convert_block_hash(get_block_hash(pool.blocks[block_id].block_hash))
        for block_id in whole
    }
    assert len(hashes) == len(whole)
    assert router.known == hashes


def test_whole_blocks_are_told_and_partial_tails_are_not(engine, router):
    engine.run([Ask(words(100), greedy())])
    assert len(router.known) == 3
    check(engine, router)
    engine.run([Ask(words(100)[:90] + words(9, seed=1), greedy())])
    check(engine, router)


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_prefix_router_knows_what_a_prompt_has_cached(engine, router, salt):
    prefixes = PrefixRouter(block_size=BLOCK)
    prefixes.add_worker("engine", has_events=True)
    router.listeners.append(lambda event: prefixes.apply_events("engine", [event]))
    tree = engine.scheduler.parts.radix.pool.tree
    rng = random.Random(0)
    beginnings = [words(rng.randrange(20, 250), seed=number) for number in range(5)]
    prompts = [
        rng.choice(beginnings)[: rng.randrange(10, 250)]
        + words(rng.randrange(1, 90), seed=100 + rng.randrange(9))
        for _ in range(30)
    ]
    num_known = 0
    for number, prompt in enumerate(prompts):  # more than the cache holds: blocks are evicted
        engine.run([Ask(prompt, greedy(5), cache_salt=salt)])
        check(engine, router)
        for other in prompts[: number + 1]:
            known = prefixes.cached_tokens(np.array(other), CacheNamespace(salt=salt))["engine"]
            held = tree.match_prefix(CacheNamespace(salt=salt), pack(other)).num_tokens
            assert known == min(held // BLOCK * BLOCK, len(other) - 1)
            num_known += known
        assert not any(
            prefixes.cached_tokens(np.array(prompt), CacheNamespace(salt="other")).values()
        )
    assert num_known


def test_a_flush_is_told(engine, router):
    engine.run([Ask(words(100), greedy())])
    assert engine.llm.reset_prefix_cache()
    check(engine, router)
    assert not router.known


def test_the_same_prompt_twice_in_one_step_is_told_once(engine, router):
    engine.run([Ask(words(100), greedy(8)), Ask(words(100), greedy(prompt_logprobs=0))])
    assert len(router.known) == 3
    check(engine, router)


def test_a_second_copy_that_enters_the_tree_later_is_told_then(engine, router):
    """A request for scores of its prompt computes all of it, so there are two copies. The first one
    is in the tree; it is evicted while the second still runs, whose copy takes its place."""
    run = engine.llm.llm_engine
    twin = words(100)
    run.add_request("first", {"prompt_token_ids": twin}, greedy())
    run.add_request("second", {"prompt_token_ids": twin}, greedy(30, prompt_logprobs=0))
    run.step()
    run.add_request("flood", {"prompt_token_ids": words(500, seed=1)}, greedy())
    run.add_request("more", {"prompt_token_ids": words(90, seed=2)}, greedy())
    run.step()
    pool = engine.scheduler.parts.radix.pool
    assert pool.tree.match_prefix(CacheNamespace(), pack(twin)).num_tokens < 96
    while run.has_unfinished_requests():
        run.step()
    assert pool.tree.match_prefix(CacheNamespace(), pack(twin)).num_tokens == 100
    check(engine, router)
    assert len(router.known) >= 4


def test_the_report_mode_full_tells_reused_whole_blocks_again(engine, router):
    engine.run([Ask(words(100), greedy())])
    router.stored.clear()
    full = greedy(extra_args={"kv_cache_report_mode": "full"})
    (result,) = engine.run([Ask(words(100)[:80] + words(30, seed=1), full)])
    assert result.num_cached_tokens == 80
    assert [len(event.block_hashes) for event in router.stored] == [2, 1]
    assert list(router.stored[0].token_ids) == words(100)[:64]
    check(engine, router)


@pytest.mark.parametrize("seed", range(4))
def test_a_router_stays_right_through_random_traffic(engine, router, seed):
    """Shared beginnings, twins, tenants, aborts, pins and flushes in a cache that overflows."""
    rng = random.Random(seed)
    scheduler, run = engine.scheduler, engine.llm.llm_engine
    beginnings = [words(rng.randrange(20, 250), seed=number) for number in range(5)]
    pins: list[str] = []
    for round_number in range(12):
        names = []
        for number in range(rng.randrange(1, 7)):
            prompt = rng.choice(beginnings)[: rng.randrange(10, 250)]
            prompt = prompt + words(rng.randrange(1, 90), seed=100 + rng.randrange(9))
            inputs: dict[str, Any] = {"prompt_token_ids": prompt}
            if rng.random() < 0.3:
                inputs["cache_salt"] = rng.choice("ab")
            for prompt_logprobs in (None, 0) if rng.random() < 0.3 else (None,):
                names.append(f"{round_number} {number} {prompt_logprobs}")
                params = greedy(rng.randrange(1, 40), prompt_logprobs=prompt_logprobs)
                run.add_request(names[-1], dict(inputs), params)
            if rng.random() < 0.5:
                run.step()
        while run.has_unfinished_requests():
            run.step()
            if rng.random() < 0.05:
                run.abort_request([rng.choice(names)])
        check(engine, router)
        if pins and rng.random() < 0.5:
            scheduler.sgl_vllm.unpin(pins.pop())
        elif rng.random() < 0.5:
            answer = scheduler.sgl_vllm.pin(rng.choice(beginnings))
            pins += [answer.pinned.pin_id] if answer.pinned is not None else []
        if rng.random() < 0.1:
            assert engine.llm.reset_prefix_cache()
            pins.clear()
    for pin_id in pins:
        scheduler.sgl_vllm.unpin(pin_id)
    check(engine, router)


def test_after_an_error_in_the_tree_vllms_own_cache_goes_on_telling(start, monkeypatch):
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = start({}, kv_events_config=events, num_gpu_blocks_override=24, max_model_len=512)
    monkeypatch.setattr(engine.scheduler, "kv_event_publisher", router := Router())
    engine.run([Ask(words(100), greedy())])

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(RadixTree, "insert", broken)
    asks = [Ask(words(200), greedy(40)), Ask(words(200), greedy()), Ask(words(90, 1), greedy())]
    assert [engine.run([ask])[0].num_cached_tokens for ask in asks] == [100, 192, 0]
    assert engine.scheduler.parts.radix.tree is None
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert router.known == {
        maybe_convert_block_hash(get_block_hash(block.block_hash))
        for block in pool.blocks
        if block.block_hash is not None
    }
    assert len(router.known) == 7 + 2
