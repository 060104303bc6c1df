"""Which worker a request goes to, and what a router knows of the workers' caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.costs import CostModel, Load
from sgl_vllm.routing.router import PrefixRouter, UnknownWorker

BLOCK = 16


def tokens(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100_000, num, dtype=np.int32)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def router_of(*workers: str, **arguments: Any) -> PrefixRouter:
    router = PrefixRouter(block_size=BLOCK, **arguments)
    for worker in workers:
        router.add_worker(worker)
    return router


def serve(router: PrefixRouter, prompt: Any, **arguments: Any) -> Any:
    """One request from its arrival to its end."""
    route = router.choose(prompt, **arguments)
    router.first_token(route)
    router.finished(route)
    return route.worker


@dataclass
class BlockStored:
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int = BLOCK
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[Any]
    medium: str | None = "GPU"
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    pass


# -- the choice


def test_a_request_goes_to_the_worker_with_its_prefix():
    router = router_of("a", "b", "c")
    homes = {seed: serve(router, tokens(400, seed)) for seed in range(3)}
    assert set(homes.values()) == {"a", "b", "c"}
    for seed, worker in homes.items():
        longer = np.concatenate([tokens(400, seed), tokens(50, 100 + seed)])
        assert serve(router, longer) == worker


def test_a_hot_prefix_spreads_when_its_worker_is_loaded():
    router = router_of("a", "b")
    prefix = tokens(4000)
    routes = [
        router.choose(np.concatenate([prefix, tokens(64, 1 + number)])) for number in range(40)
    ]
    for route in routes:
        router.first_token(route)
    sent = [sum(route.worker == worker for route in routes) for worker in "ab"]
    assert min(sent) > 10
    computed = sum(route.num_uncached_tokens for route in routes)
    assert computed <= 2 * 4000 + 40 * 80 + 64


def test_a_request_is_load_until_it_finishes():
    router = router_of("a")
    route = router.choose(tokens(100))
    assert router.load("a") == Load(100, 1)
    router.first_token(route)
    router.first_token(route)
    assert router.load("a") == Load(0, 1)
    router.finished(route)
    router.finished(route)
    assert router.load("a") == Load(0, 0)


def test_a_fork_group_stays_together_until_that_costs_too_much():
    router = router_of("a", "b", cost=CostModel(group_patience_tokens=2000))
    first = router.choose(tokens(500), group="g")
    workers = [router.choose(tokens(500, seed), group="g").worker for seed in range(1, 12)]
    assert workers[:2] == [first.worker] * 2
    assert set(workers) == {"a", "b"}


def test_many_sessions_of_one_tenant_cost_no_other_tenant_its_worker(monkeypatch):
    monkeypatch.setattr("sgl_vllm.routing.router.MAX_GROUPS", 50)
    router = router_of("a", "b", cost=CostModel(group_patience_tokens=1_000_000))
    hostile, other = CacheNamespace(salt="hostile"), CacheNamespace(salt="other")
    serve(router, tokens(1))
    homes = {name: serve(router, tokens(9), group=name, namespace=other) for name in "stuvwxyz"}
    assert set(homes.values()) == {"a", "b"}
    for number in range(200):  # the last ones with the other's names
        group = "stuvwxyz"[number % 8] if number > 150 else number
        router.choose(tokens(9, number), group=group, namespace=hostile)
    assert len(router._groups) == 50
    assert homes == {n: serve(router, tokens(9, 7), group=n, namespace=other) for n in homes}


def test_text_is_matched_as_tokens_are():
    router = router_of("a", "b")
    prompt = ("You are a helpful assistant. " * 20).encode()
    home = serve(router, prompt + b"What is a tree?")
    assert serve(router, tokens(300)) != home
    assert serve(router, prompt + b"And what is a forest?") == home
    assert router.cached_tokens(prompt)[home] == len(prompt) // 64 * 16


# -- workers come and go


def test_a_removed_workers_cache_and_routes_are_dropped():
    router = router_of("a")
    route = router.choose(tokens(400), group="g")
    router.remove_worker("a")
    router.add_worker("b")
    router.finished(route)
    assert router.load("b") == Load()
    assert router.cached_tokens(tokens(400)) == {"b": 0}
    assert router.choose(tokens(400), group="g").worker == "b"
    with pytest.raises(UnknownWorker):
        router.remove_worker("a")


# -- caches known from KV events


def router_with_events() -> PrefixRouter:
    router = PrefixRouter(block_size=BLOCK)
    router.add_worker("a", has_events=True)
    return router


def stored(text: np.ndarray, names: str, parent: str | None = None, **more: Any) -> BlockStored:
    return BlockStored(list(names), parent, text.tolist(), **more)


def test_after_a_gap_batches_can_be_replayed():
    router, text = router_with_events(), tokens(4 * BLOCK)
    first, second = stored(text[: 2 * BLOCK], "ab"), stored(text[2 * BLOCK :], "cd", "b")
    assert router.apply_events("a", [first], 5)
    assert not router.apply_events("a", [second], 7)
    for number, events in enumerate([[first], [], [second]], 5):
        assert router.apply_events("a", events, number)
    assert router.cached_tokens(text) == {"a": 4 * BLOCK - 1}
    assert router.apply_events("a", [BlockRemoved(["b"])], 6)  # an old batch
    assert router.cached_tokens(text) == {"a": 4 * BLOCK - 1}


def test_a_repeated_batch_is_skipped_and_batch_0_is_a_restart():
    router, text = router_with_events(), tokens(2 * BLOCK)
    router.apply_events("a", [], 0)
    router.apply_events("a", [stored(text, "ab")], 1)
    router.apply_events("a", [BlockRemoved(["b"])], 2)
    router.apply_events("a", [stored(text, "ab")], 1)
    assert router.cached_tokens(text) == {"a": BLOCK}
    router.apply_events("a", [], 0)
    assert router.cached_tokens(text) == {"a": 0}


def test_images_other_tiers_and_partial_blocks_are_ignored():
    router, text = router_with_events(), tokens(3 * BLOCK)
    image = [None, (("image", 3),), None]
    router.apply_events("a", [stored(text, "abc", extra_keys=image)])
    assert router.cached_tokens(text) == {"a": BLOCK}
    router.apply_events("a", [stored(text[:BLOCK], "y", extra_keys=image[1:2])])
    router.apply_events("a", [stored(text[:0], "")])
    router.apply_events("a", [stored(text[BLOCK : 2 * BLOCK], "x", "a", medium="CPU")])
    router.apply_events("a", [stored(text[BLOCK : 2 * BLOCK], "x", "a", group_idx=1)])
    router.apply_events("a", [stored(text[BLOCK : BLOCK + 5], "x", "a", block_size=5)])
    assert router.cached_tokens(text) == {"a": BLOCK}


def test_of_several_groups_the_first_of_full_attention_counts():
    router, text = router_with_events(), tokens(3 * BLOCK)
    window: Any = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full: Any = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    more: Any = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    router.apply_events("a", [stored(text, "abc", **window)], 0)
    assert router.cached_tokens(text) == {"a": 3 * BLOCK - 1}
    router.apply_events("a", [stored(text[: 2 * BLOCK], "ab", **full)], 1)
    assert router.cached_tokens(text) == {"a": 2 * BLOCK}
    router.apply_events("a", [stored(text, "abc", **more), stored(text, "abc", **window)], 2)
    router.apply_events(
        "a", [BlockRemoved(["a"], group_idx=0), BlockRemoved(["a"], group_idx=2)], 3
    )
    assert router.cached_tokens(text) == {"a": 2 * BLOCK}
    router.apply_events("a", [BlockRemoved(["b"], group_idx=1)], 4)
    assert router.cached_tokens(text) == {"a": BLOCK}


def test_a_sent_prompt_counts_as_cached_until_its_event_is_due():
    clock = Clock()
    router = PrefixRouter(block_size=BLOCK, clock=clock)
    router.add_worker("a", has_events=True)
    router.choose(tokens(400))
    assert router.cached_tokens(tokens(400)) == {"a": 399}
    clock.now_s = 61.0
    router.choose(tokens(400, 1))
    assert router.cached_tokens(tokens(400)) == {"a": 0}


def test_guessed_prefixes_expire():
    clock = Clock()
    router = router_of("a", max_age_s=100.0, clock=clock)
    serve(router, tokens(400))
    clock.now_s = 101.0
    serve(router, tokens(400, 1))
    assert router.cached_tokens(tokens(400)) == {"a": 0}
