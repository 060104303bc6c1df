"""KV events, as a router outside would follow them, tell exactly what the tree holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from vllm.config.kv_events import KVEventsConfig

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.radix.tokens import pack
from sgl_vllm.routing.router import PrefixRouter
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.event_subscriber import Subscriber, whole_blocks

BLOCK = 32


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return start({}, kv_events_config=events, num_gpu_blocks_override=24, max_model_len=512)


@pytest.fixture
def router(engine, monkeypatch) -> Subscriber:
    assert engine.llm.reset_prefix_cache()
    engine.scheduler.kv_cache_manager.take_events()
    for name in ("add_request", "kv_event_publisher"):  # it replaces both
        monkeypatch.setattr(engine.scheduler, name, getattr(engine.scheduler, name))
    return Subscriber(engine.scheduler)


def check(engine: Engine, router: Subscriber) -> None:
    """At idle: the router knows every whole block of the tree, and nothing else."""
    check_pool(engine.scheduler.parts.radix.pool)
    router.read_all()
    assert router.known == whole_blocks(engine.scheduler)


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_prefix_router_knows_what_a_prompt_has_cached(engine, router, salt):
    prefixes = PrefixRouter(block_size=BLOCK)
    prefixes.add_worker("engine", has_events=True)
    router.listeners.append(lambda events: prefixes.apply_events("engine", events))
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
