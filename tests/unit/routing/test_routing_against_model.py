"""What a router knows of its workers' caches, against models that store every prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.prefix_hashes import PrefixHasher, prefix_length
from sgl_vllm.routing.router import PrefixRouter
from tests.unit.routing.test_routing import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
LENGTHS = [*range(1, 129), *range(130, 257, 2), *range(260, 400, 4)]
NAMESPACES = [CacheNamespace(), CacheNamespace(salt="a"), CacheNamespace(adapter="a")]

Text = tuple[int, ...]


def array(text: Text) -> np.ndarray:
    return np.array(text, dtype=np.int32)


def expected(num_blocks: int, text: Text) -> int:
    """The tokens that a router finds when this many blocks are shared."""
    lengths = [length for length in LENGTHS if length <= num_blocks]
    return min(BLOCK * max(lengths, default=0), max(0, len(text) - 1))


def num_common(one: Text, other: Text) -> int:
    """The full blocks of their common prefix."""
    num = 0
    while one[num * BLOCK : (num + 1) * BLOCK] == other[num * BLOCK : (num + 1) * BLOCK]:
        if (num + 1) * BLOCK > min(len(one), len(other)):
            break
        num += 1
    return num


# Few different tokens, so that texts share prefixes. Long ones reach lengths that are not hashed.
short_texts = st.lists(st.integers(0, 1), max_size=14).map(tuple)
texts = st.one_of(
    short_texts,
    st.tuples(st.integers(100, 390), short_texts).map(lambda x: (0,) * (BLOCK * x[0]) + x[1]),
)
namespaces = st.sampled_from(NAMESPACES)
workers = st.integers(0, 3)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(workers, namespaces, texts), max_size=25), namespaces, texts)
def test_every_sent_prompt_is_found_at_its_worker(
    sent: list[tuple[int, CacheNamespace, Text]], namespace: CacheNamespace, text: Text
) -> None:
    router = PrefixRouter(block_size=BLOCK)
    for worker in range(4):
        router.add_worker(worker)
    for worker, where, what in sent:
        hashed = router._hasher.hash_prompt(array(what), where)
        router._workers[worker].approx.insert(hashed.hashes, 0.0)
    found = router.cached_tokens(array(text), namespace)
    for worker in range(4):
        here = [what for who, where, what in sent if (who, where) == (worker, namespace)]
        longest = max((num_common(what, text) for what in here), default=0)
        assert found[worker] == expected(longest, text)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["send", "come", "go", "wait"]), workers, texts)),
    st.integers(0, 200),
)
def test_a_guessed_cache_is_bounded_and_holds_only_sent_prompts(
    steps: list[tuple[str, int, Text]], capacity: int
) -> None:
    now_s = 0.0
    router = PrefixRouter(
        block_size=BLOCK, capacity_tokens=capacity, max_age_s=5.0, clock=lambda: now_s
    )
    sent: dict[Any, list[Text]] = {}
    for what, worker, text in steps:
        if what == "come" and worker not in sent:
            router.add_worker(worker)
            sent[worker] = []
        elif what == "go" and worker in sent:
            router.remove_worker(worker)
            del sent[worker]
        elif what == "wait":
            now_s += 3.0
        elif what == "send" and sent:
            route = router.choose(array(text))
            sent[route.worker].append(text)
            router.finished(route)
        for known, found in router.cached_tokens(array(text)).items():
            longest = max((num_common(one, text) for one in sent[known]), default=0)
            assert found <= expected(longest, text)
        check(router)
    for worker in sent:
        router.remove_worker(worker)
    assert not list(router._approx_index.nodes())
    assert not router._groups and not len(router._book)


def check(router: PrefixRouter) -> None:
    """Each worker's cache agrees with the tree, is within its bound, and is prefix-closed."""
    nodes = list(router._approx_index.nodes())
    for entry in router._workers.values():
        bit = 1 << entry.slot
        own = [node for node in nodes if node.workers & bit]
        assert set(own) == set(entry.approx._sent_s)
        num_blocks = sum(node.num_blocks for node in own)
        assert num_blocks == entry.approx.num_blocks <= entry.approx.capacity_blocks
    for node in nodes:
        assert node.workers and len(node.hashes)
        for child in node.children.values():
            assert child.parent is node and child.start == node.end
            assert child.workers & ~node.workers == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "remove", "clear", "gap"]),
            workers,
            namespaces,
            texts,
            st.integers(0, 400),
        ),
        max_size=30,
    ),
    st.lists(st.tuples(namespaces, texts), min_size=1, max_size=4),
)
def test_what_events_report_is_known_exactly(
    steps: list[tuple[str, int, CacheNamespace, Text, int]],
    asked: list[tuple[CacheNamespace, Text]],
) -> None:
    """A model engine holds blocks, each named by all tokens up to its end. It removes a
    block after those that continue it."""
    router = PrefixRouter(block_size=BLOCK)
    held: list[set[tuple[CacheNamespace, Text]]] = [set() for _ in range(4)]
    for worker in range(4):
        router.add_worker(worker, has_events=True)
    numbers = [0] * 4
    for what, worker, namespace, text, place in steps:
        blocks = held[worker]
        events: list[Any] = []
        if what == "store":
            ends = range(BLOCK, len(text) + 1, BLOCK)
            names = [(namespace, text[:end]) for end in ends]
            known = 0  # blocks held already; the engine stores those that follow
            while known < len(names) and names[known] in blocks:
                known += 1
            if names[known:]:
                own_keys = tuple(filter(None, namespace))
                assert not isinstance(namespace.adapter, tuple)  # a router knows no paths
                events = [
                    BlockStored(
                        names[known:],
                        names[known - 1] if known else None,
                        list(text[known * BLOCK : len(names) * BLOCK]),
                        BLOCK,
                        lora_name=namespace.adapter,
                        extra_keys=[own_keys] * len(names[known:]),
                    )
                ]
                blocks.update(names)
        elif what == "remove" and blocks:
            parents = {(space, tokens[:-BLOCK]) for space, tokens in blocks}
            leaves = sorted(blocks - parents, key=repr)
            name = leaves[place % len(leaves)]
            blocks.remove(name)
            events = [BlockRemoved([name, "never stored"])]
        elif what == "clear":
            blocks.clear()
            events = [AllBlocksCleared()]
        elif what == "gap":
            numbers[worker] += 1
            blocks.clear()
        is_whole = router.apply_events(worker, events, numbers[worker])
        numbers[worker] += 1
        assert is_whole or what == "gap"
    for namespace, text in asked + [(one[2], one[3]) for one in steps]:
        found = router.cached_tokens(array(text), namespace)
        for worker in range(4):
            num_blocks = 0
            while (
                num_blocks < len(text) // BLOCK
                and (namespace, text[: (num_blocks + 1) * BLOCK]) in held[worker]
            ):
                num_blocks += 1
            assert found[worker] == expected(num_blocks, text)
    for worker in range(4):
        cache = router._workers[worker].events
        assert cache is not None
        assert len(cache) == len(held[worker])
        router.remove_worker(worker)
    assert not len(router._event_index)


def test_short_prefixes_are_all_hashed_and_long_ones_at_64_lengths_per_doubling() -> None:
    hasher = PrefixHasher(BLOCK)
    hashed = hasher.hash_prompt(np.zeros(BLOCK * 5000, dtype=np.int32))
    lengths = [prefix_length(number) for number in range(1, len(hashed.hashes) + 1)]
    assert lengths[: len(LENGTHS)] == LENGTHS
    for length in (128, 256, 1024, 2048):
        assert sum(length < one <= 2 * length for one in lengths) == 64
    assert 5000 - lengths[-1] < 5000 / 64


def test_texts_that_differ_in_few_high_bits_have_different_hashes() -> None:
    hasher = PrefixHasher()
    text = np.zeros(64, dtype=np.uint8)
    hashes = set()
    for number in range(1 << 12):
        text[[7, 15]] = number >> 6 << 2, (number & 63) << 2
        hashes.update(hasher.hash_prompt(text.tobytes()).hashes.tolist())
    assert len(hashes) == 1 << 12
