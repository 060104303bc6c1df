"""Random lives of a cache with window groups: the tree against what every block holds.

The model knows of each block its group, its number, and the tokens from the first of the sequence
to the last in the block, because what a block holds depends on all of them. Each group's blocks may
have a size of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any  # Any: hypothesis's `data`

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sgl_vllm.radix.components.windows import HOLE, WindowGroup
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import Match, Node
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.effort import examples
from tests.unit.radix.lives import LivesOfATree
from tests.unit.radix.trees import chunks, sliding_window

NAMESPACES = st.sampled_from("xy")
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)
KINDS = [sliding_window(2), sliding_window(3), sliding_window(7), chunks(3), chunks(4), chunks(8)]
FULL_ATTENTION_TOO = [*KINDS, sliding_window(1000)]


@dataclass
class Content:
    """What a block holds. Group 0 is full attention."""

    namespace: str
    group: int
    number: int
    tokens: list[int]


@dataclass
class Running:
    """A request that holds blocks: a list for each group, in which `HOLE` is vLLM's null block."""

    namespace: str
    tokens: list[int]
    blocks: list[list[int]]
    own_leaf: Node | None = None


class WindowsAgainstModel(LivesOfATree):
    """Requests arrive and hold what they hit and fresh blocks for the rest. They are inserted
    before they drop what leaves their windows, as the cache's manager does it; they decode, and
    end."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
        kinds=st.lists(st.sampled_from(FULL_ATTENTION_TOO), min_size=1, max_size=3),
        data=st.data(),
    )
    def start(self, block_size: int, kinds: list[Callable[[int], int]], data: Any) -> None:
        sizes = [block_size]
        if data.draw(st.booleans(), "blocks of several sizes"):
            sizes = [size for size in range(1, block_size + 1) if block_size % size == 0]
        self.sizes = [block_size, *(data.draw(st.sampled_from(sizes)) for _ in kinds)]
        self.kinds = kinds
        self.now = 0.0
        self.tree = RadixTree(
            block_size,
            clock=self.clock,
            window_groups=[*map(WindowGroup, self.sizes[1:], kinds)],
            max_evicted_bytes=1 << 13,
        )
        self.content: dict[int, Content] = {}
        self.holders: dict[int, int] = {}
        self.running: list[Running] = []
        self.inserted: list[tuple[str, list[int]]] = []
        self.watching: dict[int, tuple[str, list[int], tuple[Match, int]]] = {}
        self.fresh = count()

    def clock(self) -> float:
        self.now += 1
        return self.now

    # -- what a cache does --------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES, first_chunk=st.integers(1, 30))
    def admit(self, data, namespace, tokens, first_chunk):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        limit = len(tokens)
        if data.draw(st.booleans(), "computes more than it must"):
            limit = data.draw(st.integers(0, len(tokens)))
        num_cached = self.tree.longest_hit(match, limit)
        hit = [self.tree.block_ids(match, num_cached), *self.tree.window_ids(match, num_cached)]
        if num_cached:
            self.tree.record_hit(match)
        request = Running(namespace, tokens[:num_cached], hit)
        for size, ids in zip(self.sizes, request.blocks, strict=True):
            if num_cached % size:  # a copy of the partial last block
                ids[-1] = self.copy(ids[-1], num_cached)
        for block in {block for ids in request.blocks for block in ids} - {HOLE}:
            self.holders[block] = self.holders.get(block, 0) + 1
        self.tree.lock([block for ids in request.blocks for block in ids])
        self.running.append(request)
        self.compute(request, tokens[: num_cached + first_chunk])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def compute_more(self, data, more):
        request = self.draw_running(data)
        self.leave_windows(request)
        self.compute(request, [*request.tokens, *more])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave_windows_behind(self, data):
        self.leave_windows(self.draw_running(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert_less_than_before(self, data):
        request = self.draw_running(data)
        self.insert(request, data.draw(st.integers(0, len(request.tokens))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        request = self.draw_running(data)
        if keep:
            self.insert(request, len(request.tokens))
        self.running.remove(request)
        for ids in request.blocks:
            self.release(reversed(ids))

    @rule(num_blocks=st.integers(1, 9), data=st.data())
    def evict(self, num_blocks, data):
        wanted: set[Node] = set()
        if self.inserted and data.draw(st.booleans(), "some are wanted"):
            namespace, tokens = data.draw(st.sampled_from(self.inserted))
            node = self.tree.match_prefix(namespace, pack(tokens)).node
            wanted = set() if node is None else {node}
        num_evictable, in_tree = self.tree.num_evictable_blocks, self.blocks_in_tree()
        evicted = self.tree.evict(num_blocks, wanted)
        free = [block for block in evicted if not self.holders[block]]
        assert len(free) >= min(num_blocks, num_evictable)
        assert len(evicted) == len(set(evicted))
        assert in_tree - self.blocks_in_tree() == set(evicted)

    @rule(age=st.integers(0, 40))
    def expire(self, age):
        self.tree.expire(self.now - age)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def evict_one(self, data):
        """Of a window group, that is a hole and no more."""
        of_windows = sorted(b for b, held in self.content.items() if held.group and b in self.tree)
        is_any = not of_windows or data.draw(st.integers(0, 3), "0 for any") == 0
        block = data.draw(st.sampled_from(sorted(self.content) if is_any else of_windows))
        before = self.blocks_in_tree()
        evicted = self.tree.evict_block(block)
        assert block not in self.tree
        assert self.blocks_in_tree() == before - set(evicted)
        if block in before and self.content[block].group:
            assert evicted == [block]

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.tree.clear()
        self.inserted.clear()
        assert self.tree.num_blocks == self.tree.num_nodes == self.tree.num_tokens == 0

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def watch(self, data, namespace, tokens):
        self.watch_from_now(
            data.draw(st.integers(0, 7)), *self.draw_continuation(data, namespace, tokens)
        )

    # -- what must hold -----------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def a_hit_is_as_long_as_the_blocks_in_the_tree_allow(self, data, namespace, tokens):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        limit = data.draw(st.integers(0, len(tokens)), "at most so many")
        num_tokens = self.tree.longest_hit(match, limit)
        assert num_tokens == self.longest_by_the_model(namespace, tokens, match.num_tokens, limit)
        lists = [self.tree.block_ids(match, num_tokens), *self.tree.window_ids(match, num_tokens)]
        for group, (size, ids) in enumerate(zip(self.sizes, lists, strict=True)):
            assert len(ids) == -(-num_tokens // size)
            num_skipped = self.num_skipped(group, num_tokens) // size
            assert ids[:num_skipped] == [HOLE] * num_skipped
            for number, block in enumerate(ids[num_skipped:], num_skipped):
                held = self.content[block]
                end = min((number + 1) * size, num_tokens)
                assert (held.namespace, held.group, held.number) == (namespace, group, number)
                assert held.tokens[:end] == tokens[:end]

    def longest_by_the_model(self, namespace, tokens, num_matched, limit) -> int:
        """Tries every length. A block serves if it agrees as far as the match goes."""

        def is_there(group: int, number: int) -> bool:
            end = min((number + 1) * self.sizes[group], num_matched)
            return any(
                held.namespace == namespace
                and (held.group, held.number) == (group, number)
                and held.tokens[:end] == tokens[:end]
                for block, held in self.content.items()
                if block in self.tree
            )

        return next(
            length
            for length in range(min(num_matched, limit), -1, -1)
            if all(
                is_there(group, number)
                for group, size in enumerate(self.sizes)
                if group > 0
                for number in range(self.num_skipped(group, length) // size, -(-length // size))
            )
        )

    @invariant()
    def the_tree_agrees_with_itself_and_with_the_requests(self):
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        in_tree = [block for block in self.content if block in self.tree]
        held = [block for block in in_tree if self.holders[block]]
        assert self.tree.num_blocks == len(in_tree)
        assert self.tree.num_locked_blocks == len(held)

    @invariant()
    def watchers_are_notified_when_all_of_a_match_can_be_read_or_no_longer(self):
        if not hasattr(self, "tree"):
            return
        changed = self.tree.watchers.take_changed()
        for watcher, (namespace, tokens, (match, hit)) in self.watching.items():
            if watcher not in changed:
                match_now, hit_now = self.hit_of(namespace, tokens)
                assert match_now == match
                assert (hit_now == match.num_tokens) == (hit == match.num_tokens)
        for watcher in self.watching.keys() & changed:
            namespace, tokens, _ = self.watching[watcher]
            self.watch_from_now(watcher, namespace, tokens)

    # -- inside -------------------------------------------------------------------------------

    def blocks_in_tree(self) -> set[int]:
        return {block for block in self.content if block in self.tree}

    def draw_running(self, data) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def copy(self, source: int, num_tokens: int) -> int:
        """A block of its own for a request that hits only the first `num_tokens`."""
        held, block = self.content[source], next(self.fresh)
        self.content[block] = Content(
            held.namespace, held.group, held.number, held.tokens[:num_tokens]
        )
        return block

    def compute(self, request: Running, tokens: list[int]) -> None:
        """`request` computes the rest of `tokens` into blocks of its own."""
        begin = len(request.tokens)
        for group, (size, ids) in enumerate(zip(self.sizes, request.blocks, strict=True)):
            for number in range(begin // size, -(-len(tokens) // size)):
                if number == len(ids):
                    ids.append(next(self.fresh))
                    self.holders[ids[number]] = 1
                held = tokens[: (number + 1) * size]
                if ids[number] != HOLE:
                    self.content[ids[number]] = Content(request.namespace, group, number, held)
        request.tokens = tokens

    def leave_windows(self, request: Running) -> None:
        """vLLM gives back what the next tokens do not read. All is inserted before that."""
        self.insert(request, len(request.tokens))
        for group, ids in enumerate(request.blocks):
            num_skipped = self.num_skipped(group, len(request.tokens))
            end = min(num_skipped // self.sizes[group], len(ids))
            gone = ids[:end]
            ids[:end] = [HOLE] * end
            self.release(reversed(gone))

    def release(self, blocks) -> None:
        blocks = [block for block in blocks if block != HOLE]
        for block in blocks:
            self.holders[block] -= 1
        self.tree.unlock([block for block in blocks if not self.holders[block]])

    def insert(self, request: Running, length: int) -> None:
        own_leaf = request.own_leaf if self.tree.can_extend(request.own_leaf, length) else None
        num_known = own_leaf.end if own_leaf is not None else 0
        full, *windows = [
            ids[num_known // size : -(-length // size)]
            for size, ids in zip(self.sizes, request.blocks, strict=True)
        ]
        before = [(entry, self.hit_of(*entry)[1]) for entry in self.inserted]
        in_tree = self.blocks_in_tree()
        request.own_leaf, taken, evicted, taken_windows = self.tree.insert(
            request.namespace, pack(request.tokens[:length]), full, own_leaf, windows=windows
        )
        assert {*taken, *taken_windows} <= {block for ids in request.blocks for block in ids}
        assert self.blocks_in_tree() - in_tree == {*taken, *taken_windows} - in_tree
        assert in_tree - self.blocks_in_tree() == set(evicted)
        if length:
            self.inserted.append((request.namespace, request.tokens[:length]))
        if any(HOLE in ids for ids in windows):
            return
        for (namespace, tokens), num_tokens in before:  # no hit becomes shorter
            assert self.hit_of(namespace, tokens)[1] >= num_tokens


TestWindowsAgainstModel = WindowsAgainstModel.TestCase
TestWindowsAgainstModel.settings = settings(
    max_examples=examples(300), stateful_step_count=30, deadline=None
)
