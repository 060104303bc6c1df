"""What a router knows of its workers, against models that keep all texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.routing.prefix_hashes import Namespace, PrefixHasher, ladder_length
from sgl_vllm.routing.router import PrefixRouter
from tests.unit.routing.test_routing import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
LADDER = [*range(1, 129), *range(130, 257, 2), *range(260, 400, 4)]
NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(lora="a")]

Text = tuple[int, ...]


def array(text: Text) -> np.ndarray:
    return np.array(text, dtype=np.int32)


def expected(num_blocks: int, text: Text) -> int:
    """What a router says of so many shared blocks, in tokens."""
    steps = [length for length in LADDER if length <= num_blocks]
    return min(BLOCK * max(steps, default=0), max(0, len(text) - 1))


def num_common(one: Text, other: Text) -> int:
    """Whole blocks that both begin with."""
    num = 0
    while one[num * BLOCK : (num + 1) * BLOCK] == other[num * BLOCK : (num + 1) * BLOCK]:
        if (num + 1) * BLOCK > min(len(one), len(other)):
            break
        num += 1
    return num


# Few tokens, so that texts share beginnings; long ones go past the dense part of the ladder.
short_texts = st.lists(st.integers(0, 1), max_size=14).map(tuple)
texts = st.one_of(
    short_texts,
    st.tuples(st.integers(100, 390), short_texts).map(lambda x: (0,) * (BLOCK * x[0]) + x[1]),
)
namespaces = st.sampled_from(NAMESPACES)
workers = st.integers(0, 3)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(workers, namespaces, texts), max_size=25), namespaces, texts)
def test_all_that_was_sent_is_known_where_it_was_sent(
    sent: list[tuple[int, Namespace, Text]], namespace: Namespace, text: Text
) -> None:
    router = PrefixRouter(block_size=BLOCK)
    for worker in range(4):
        router.add_worker(worker)
    for worker, where, what in sent:
        keys = router._hasher.prefixes(array(what), where).keys
        router._workers[worker].sent.send(keys, 0.0)
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
def test_what_was_sent_is_never_more_than_its_bound_and_never_made_up(
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
        for worker, found in router.cached_tokens(array(text)).items():
            longest = max((num_common(one, text) for one in sent[worker]), default=0)
            assert found <= expected(longest, text)
        check(router)
    for worker in sent:
        router.remove_worker(worker)
    assert not list(router._sent_tree.nodes())
    assert not router._groups and not router._open and not router._in_queue


def check(router: PrefixRouter) -> None:
    """Each worker's own book is the tree's; bounds hold; caches are prefix-closed."""
    nodes = list(router._sent_tree.nodes())
    for entry in router._workers.values():
        bit = 1 << entry.slot
        own = [node for node in nodes if node.workers & bit]
        assert set(own) == set(entry.sent._sent_s)
        num_grains = sum(node.num_grains for node in own)
        assert num_grains == entry.sent.num_grains <= entry.sent.capacity_grains
    for node in nodes:
        assert node.workers and len(node.keys)
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
def test_what_is_told_is_known_exactly(
    steps: list[tuple[str, int, Namespace, Text, int]], asked: list[tuple[Namespace, Text]]
) -> None:
    """A model engine holds blocks, each named by all tokens up to its end; any may go."""
    router = PrefixRouter(block_size=BLOCK)
    held: list[set[tuple[Namespace, Text]]] = [set() for _ in range(4)]
    for worker in range(4):
        router.add_worker(worker, has_events=True)
    numbers = [0] * 4
    for what, worker, namespace, text, place in steps:
        blocks = held[worker]
        events: list[Any] = []
        if what == "store":
            ends = range(BLOCK, len(text) + 1, BLOCK)
            names = [(namespace, text[:end]) for end in ends]
            known = 0  # of the beginning; an engine stores what follows
            while known < len(names) and names[known] in blocks:
                known += 1
            if names[known:]:
                own_keys = tuple(filter(None, namespace))
                events = [
                    BlockStored(
                        names[known:],
                        names[known - 1] if known else None,
                        list(text[known * BLOCK : len(names) * BLOCK]),
                        BLOCK,
                        lora_name=namespace.lora,
                        extra_keys=[own_keys] * len(names[known:]),
                    )
                ]
                blocks.update(names)
        elif what == "remove" and blocks:
            name = sorted(blocks, key=repr)[place % len(blocks)]
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
        told = router._workers[worker].told
        assert told is not None
        assert len(told) == len(held[worker])
        router.remove_worker(worker)
    assert not len(router._told_index)


def test_the_ladder_is_dense_at_first_and_has_64_steps_between_a_length_and_its_double() -> None:
    hasher = PrefixHasher(BLOCK)
    prefixes = hasher.prefixes(np.zeros(BLOCK * 5000, dtype=np.int32))
    lengths = [ladder_length(number) for number in range(1, len(prefixes.keys) + 1)]
    assert lengths[: len(LADDER)] == LADDER
    for length in (128, 256, 1024, 2048):
        assert sum(length < one <= 2 * length for one in lengths) == 64
    assert 5000 - lengths[-1] < 5000 / 64


def test_texts_that_differ_in_few_high_bits_have_different_numbers() -> None:
    hasher = PrefixHasher()
    text = np.zeros(64, dtype=np.uint8)
    keys = set()
    for number in range(1 << 12):
        text[[7, 15]] = number >> 6 << 2, (number & 63) << 2
        keys.update(hasher.prefixes(text.tobytes()).keys.tolist())
    assert len(keys) == 1 << 12


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 19))
def test_a_text_can_be_continued_from_any_grain(text: list[int], place: int) -> None:
    hasher = PrefixHasher(BLOCK)
    grains = hasher.grains(array(tuple(text)))
    whole = hasher.states(grains, 7).tolist()
    place = min(place, len(grains))
    state = whole[place - 1] if place else 7
    assert hasher.states(grains[place:], state).tolist() == whole[place:]
