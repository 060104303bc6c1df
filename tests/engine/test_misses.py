"""Why prompt tokens were not cached: random requests against a naive replay, and single causes.

The replay knows the tree only by the tokens of its nodes. It keeps every prefix that was ever in
the tree, and of those that have left the reason that an observer of the evictions gave.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from sgl_vllm.counters import declarations
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.radix.misses import MissCounters
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.cached_prefixes import Prefix, prefixes_in
from tests.engine.cache import Cache
from tests.engine.jobs import mixed_jobs, serve
from tests.engine.machine import Machine
from tests.engine.test_groups import make_tiny

ADAPTERS = [None, LoRARequest("french", 1, "/french"), LoRARequest("german", 2, "/german")]

CACHED = "cached"


def small_cache(num_blocks: int = 100, **options: Any) -> Cache:
    return Cache(num_blocks, 256, block_size=4, why_exact=True, **options)


def explained(cache: Cache, request: Request) -> dict[str, Any]:
    of, salt = request.request_id, request.cache_salt
    (answer,) = cache.manager.misses.explain(of, salt, now=0.0)
    return answer


def causes_of(cache: Cache, prompt: list[int]) -> list[tuple[str, int, int]]:
    """Of a request that is served."""
    return causes(explained(cache, cache.serve(prompt)))


def causes(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(one["cause"], one["start"], one["end"]) for one in answer["causes"]]


def by_token(answer: dict[str, Any]) -> list[str]:
    """The cause of each missed token."""
    return [one["cause"] for one in answer["causes"] for _ in range(one["start"], one["end"])]


def check_sums(counters: MissCounters, wanted: Counter[str]) -> None:
    counted = {
        declared.key: getattr(counters, declared.key)
        for declared in declarations(MissCounters)
        if declared.labels
    }
    assert {cause: number for cause, number in counted.items() if number} == dict(wanted)
    assert counters.missed_prompt_tokens == wanted.total()


# -- the replay --------------------------------------------------------------------------------


class Replay:
    """Every prefix that was ever cached: `CACHED`, or why it is not any more."""

    def __init__(self, tree: RadixTree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.known: dict[Prefix, str] = {}
        for name, reason in (("evict", "evicted"), ("expire", "expired"), ("clear", "flushed")):
            monkeypatch.setattr(tree, name, self.observed(getattr(tree, name), reason))

    def observed(self, method: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = prefixes_in(self.tree)
            result = method(*args)
            self.known.update(dict.fromkeys(before, CACHED))
            self.known.update(dict.fromkeys(before - prefixes_in(self.tree), reason))
            return result

        return call

    def explain(
        self, namespace: Any, prompt: list[int], num_read: int, first_scored: int | None
    ) -> list[str]:
        """The cause of each token after the hit. To be called right after the lookup."""
        self.known.update(dict.fromkeys(prefixes_in(self.tree), CACHED))

        def state(length: int) -> str:
            return self.known.get((namespace, tuple(prompt[:length])), "new")

        lengths = range(1, len(prompt) + 1)
        matched = sum(1 for _ in itertools.takewhile(lambda n: state(n) == CACHED, lengths))
        result = []
        for place in range(num_read, matched):
            if place == len(prompt) - 1:
                result.append("last_token")
            elif first_scored is not None and place >= first_scored - 1:
                result.append("scored")
            else:
                result.append("whole_blocks")
        gone = list(itertools.takewhile(lambda n: state(n) != "new", lengths[matched:]))
        result += [state(length) for length in gone]
        num_left = len(prompt) - matched - len(gone)
        goes_on = any(
            of == namespace and why == CACHED and tokens[:-1] == tuple(prompt[:matched])
            for (of, tokens), why in self.known.items()
            if len(tokens) == matched + 1
        )
        differs = matched and not gone and goes_on
        return result + ["differs" if differs else "new"] * num_left


def random_prompts(rng: random.Random) -> Iterator[list[int]]:
    """Some begin as an earlier one; of few tokens, so that others share by chance."""
    earlier: list[list[int]] = [[1]]
    while True:
        begin = rng.choice(earlier[-40:])
        begin = begin[: rng.randrange(len(begin) + 1)] if rng.random() < 0.8 else []
        tail = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        prompt = [*begin, *tail][:40]
        if rng.random() < 0.2:
            prompt = list(rng.choice(earlier[-40:]))
        earlier.append(prompt)
        yield prompt


@pytest.mark.parametrize("seed", range(4))
def test_the_explanations_of_random_requests_are_those_of_a_replay(seed, monkeypatch):
    rng = random.Random(seed)
    cache = small_cache(rng.choice([25, 60]))
    ticks = itertools.count()
    monkeypatch.setattr(cache.tree, "clock", lambda: float(next(ticks)))
    replay = Replay(cache.tree, monkeypatch)
    prompts = random_prompts(rng)
    running: list[Request] = []
    sums: Counter[str] = Counter()
    for _ in range(500):
        adapter, salt = rng.choice(ADAPTERS[: 1 + seed]), rng.choice([None, None, "s"])
        request = cache.request(next(prompts), lora_request=adapter, cache_salt=salt)
        prompt = request.prompt_token_ids
        first_scored = rng.randrange(1, len(prompt) + 1) if rng.random() < 0.2 else None
        if first_scored is not None:
            cache.manager.first_scored[request] = first_scored
        if rng.random() < 0.05:
            request.skip_reading_prefix_cache = True
        if rng.random() < 0.08:
            cache.manager.pool.expire(rng.randrange(100))
        if rng.random() < 0.02 and not running:
            assert cache.manager.reset_prefix_cache()
        blocks, num_read = cache.look_up(request)
        if request.skip_reading_prefix_cache:
            wanted = ["skipped"] * len(prompt)
        else:
            record = cache.manager.pool.records.of(request)
            assert record is not None
            namespace = record.namespace
            assert isinstance(namespace, CacheNamespace)
            named = adapter and (adapter.lora_name, adapter.lora_path)
            assert (namespace.adapter, namespace.salt) == (named, salt)
            wanted = replay.explain(namespace, prompt, num_read, first_scored)
        cache.allocate(request, (blocks, num_read))
        answer = explained(cache, request)
        assert by_token(answer) == wanted
        for cause in answer["causes"]:
            assert ("before_s" in cause) == (cause["cause"] in ("evicted", "expired", "flushed"))
        assert answer["num_cached_tokens"] == num_read
        assert answer["num_missed_tokens"] == len(prompt) - num_read
        sums.update(wanted)
        running.append(request)
        while running and (len(running) > 2 or rng.random() < 0.6):
            cache.manager.free(running.pop(rng.randrange(len(running))))
        check_pool(cache.manager.pool)
    check_sums(cache.manager.misses.counters, sums)
    causes_seen = {"new", "differs", "evicted", "expired", "flushed", "scored", "last_token"}
    assert sums.keys() >= causes_seen


# -- single causes -----------------------------------------------------------------------------

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_what_a_connector_loads_is_not_missed():
    cache = small_cache()
    cache.serve(PROMPT[:5])
    request = cache.request([*PROMPT, 1, 2, 3, 4, 5])
    blocks, num_read = cache.look_up(request)
    assert num_read == 5
    # A load that goes further replaces the partial block of the hit.
    cache.allocate(request, (cache.manager.truncate_computed_blocks(blocks, 4), 4), external=8)
    answer = explained(cache, request)
    assert (answer["num_cached_tokens"], answer["num_loaded_tokens"]) == (4, 8)
    assert causes(answer) == [("new", 12, 15)]
    assert cache.manager.misses.counters.missed_prompt_tokens == 5 + 3


def test_after_an_error_the_part_is_the_cause():
    cache = small_cache(hashes=True)
    cache.serve(PROMPT)
    cache.manager.pool.switch_off("off: by this test")
    assert causes_of(cache, PROMPT) == [("part_off", 0, 10)]
    assert causes_of(cache, PROMPT) == [("part_off", 8, 10)]  # vLLM's own cache has blocks
    check_sums(cache.manager.misses.counters, Counter(new=10, part_off=10 + 2))


def test_an_error_in_a_lookup_is_the_cause_of_its_own_misses(monkeypatch):
    cache = small_cache(hashes=True)
    cache.serve(PROMPT)
    monkeypatch.setattr(cache.tree, "match_prefix", None)
    assert causes_of(cache, PROMPT) == [("part_off", 0, 10)]


# -- other layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["gemma 3", "states and a window"])
def test_every_token_has_a_cause_with_windows_and_with_states(layout):
    core = make_tiny(layout)
    jobs = mixed_jobs(60, seed=5)
    serve(core, jobs)
    radix = core.scheduler.parts.radix
    counters = radix.misses.counters
    assert counters.component > 0
    num_missed = sum(len(job.prompt) for job in jobs) - radix.counters.hit_tokens
    assert counters.missed_prompt_tokens == num_missed
    by_cause = [declared.key for declared in declarations(MissCounters) if declared.labels]
    assert sum(getattr(counters, key) for key in by_cause) == num_missed


def test_an_error_in_an_explanation_costs_neither_the_hit_nor_the_tree(monkeypatch):
    cache = small_cache()
    cache.serve(PROMPT)
    monkeypatch.setattr(cache.manager.misses, "looked_up", None)
    assert cache.look_up(cache.request(PROMPT))[1] == len(PROMPT) - 1
    assert not cache.manager.is_off


@pytest.mark.parametrize(
    ("options", "salt", "wanted"),
    [
        ({}, None, 64),
        ({}, "mine", 90),
        ({"why_exact": True}, None, 90),
        ({"tree_text": True}, None, 90),
    ],
)
def test_a_match_is_as_exact_as_what_clients_are_told_of_their_requests(
    options, salt, wanted
) -> None:
    machine = Machine(options, block_size=32)
    prompt = [number % 50 + 5 for number in range(90)]
    request = machine.add([*prompt, 3], cache_salt=salt)
    machine.run()
    control = machine.scheduler.sgl_vllm
    assert control.match([pack(prompt)], cache_salt=salt) == [wanted]
    (answer,) = control.why(request.request_id, salt)
    assert answer["exact"] == (wanted == 90)
