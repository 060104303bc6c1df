"""Random lives of a cache: the tree against dictionaries that record what every block holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_vllm.radix.eviction import POLICIES
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import Match, Node
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.effort import examples

NAMESPACES = st.sampled_from("xy")
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@dataclass
class Running:
    """A request that holds blocks. `own_leaf` is what the tree returned at its last insert."""

    namespace: str
    tokens: list[int]
    blocks: list[int]
    own_leaf: Node | None = None


class TreeAgainstModel(RuleBasedStateMachine):
    """Requests arrive, match, hold the blocks that they hit and fresh blocks for the rest, are
    inserted (at once, or when they finish), decode, and finish. Blocks are evicted and reused.

    The model: for each block its tokens, its namespace, and how many requests hold it.
    """

    @initialize(
        block_size=st.integers(1, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        memory=st.sampled_from([0, 1 << 11, 1 << 20]),
    )
    def start(self, block_size, policy, memory):
        self.size = block_size
        self.now = 0.0
        self.tree = RadixTree(
            block_size, POLICIES[policy], clock=self.clock, max_evicted_bytes=memory
        )
        self.content: dict[int, tuple[str, list[int]]] = {}
        self.holders: dict[int, int] = {}
        self.running: list[Running] = []
        self.inserted: list[tuple[str, list[int]]] = []
        self.watching: dict[int, tuple[str, list[int], Match]] = {}
        self.wanted: set[Node] = set()
        self.fresh = count()

    def clock(self) -> float:
        self.now += 1
        return self.now

    # -- what a cache does --------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES, at_once=st.booleans())
    def admit(self, data, namespace, tokens, at_once):
        if self.inserted and data.draw(st.booleans(), "continues an earlier one"):
            namespace, earlier = data.draw(st.sampled_from(self.inserted))
            tokens = [*earlier[: data.draw(st.integers(1, len(earlier)))], *tokens[:4]]
        match = self.tree.match_prefix(namespace, pack(tokens))
        shared = self.tree.block_ids(match, match.num_tokens)[: match.num_tokens // self.size]
        self.tree.lock(shared)
        self.tree.record_hit(match)
        for block in shared:
            self.holders[block] = self.holders.get(block, 0) + 1
        request = Running(namespace, [], shared)
        self.running.append(request)
        self.write(request, tokens, len(shared) * self.size)
        if at_once:
            self.insert(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def decode(self, data, more):
        request = self.draw_running(data)
        self.write(request, [*request.tokens, *more], len(request.tokens))
        if data.draw(st.booleans()):
            self.insert(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert_less_than_before(self, data):
        """An aborted request: not all that was scheduled has been computed."""
        request = self.draw_running(data)
        length = data.draw(st.integers(0, len(request.tokens)))
        self.insert_into_tree(request, length)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        request = self.draw_running(data)
        if keep:
            self.insert(request)
        self.running.remove(request)
        for block in request.blocks:
            self.holders[block] -= 1
        self.tree.unlock([b for b in reversed(request.blocks) if not self.holders[b]])

    @rule(num_blocks=st.integers(1, 6), data=st.data())
    def evict(self, num_blocks, data):
        if not data.draw(st.booleans(), "in the same step as the last eviction"):
            self.wanted = set()
            if self.inserted and data.draw(st.booleans()):
                namespace, tokens = data.draw(st.sampled_from(self.inserted))
                node = self.tree.match_prefix(namespace, pack(tokens)).node
                self.wanted = set() if node is None else {node}
        num_evictable = self.tree.num_evictable_blocks
        evicted = self.evicting(lambda: self.tree.evict(num_blocks, self.wanted))
        free = [block for block in evicted if not self.holders[block]]
        assert len(free) >= min(num_blocks, num_evictable)
        if len(evicted) == len(free):
            assert len(free) == min(num_blocks, num_evictable)
        # A held block is evicted only because one before it, which no request holds, was.
        for blocks in self.paths_before:
            gone = [bool(self.holders[block]) for block in blocks if block in evicted]
            assert True not in gone or gone[0] is False

    @rule(age=st.integers(0, 40))
    def expire(self, age):
        evicted = self.evicting(lambda: self.tree.expire(self.now - age))
        assert not any(self.holders[block] for block in evicted)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def evict_one(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        evicted = self.evicting(lambda: self.tree.evict_block(block))
        assert evicted == [] or block in evicted
        assert block not in self.tree

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.tree.clear()
        self.inserted.clear()
        assert self.tree.num_blocks == self.tree.num_nodes == self.tree.num_tokens == 0

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def watch(self, data, namespace, tokens):
        """A new watcher, or one that watches something else already."""
        if self.inserted and data.draw(st.booleans(), "continues an earlier one"):
            namespace, earlier = data.draw(st.sampled_from(self.inserted))
            tokens = [*earlier[: data.draw(st.integers(1, len(earlier)))], *tokens[:4]]
        self.watch_from_now(data.draw(st.integers(0, 7)), namespace, tokens)

    @rule(watcher=st.integers(0, 7))
    def unwatch(self, watcher):
        self.tree.watchers.unwatch(watcher)
        self.watching.pop(watcher, None)

    # -- what must hold -----------------------------------------------------------------------

    @rule(namespace=NAMESPACES, tokens=SEQUENCES)
    def every_hit_reads_the_right_tokens(self, namespace, tokens):
        match = self.tree.match_prefix(namespace, pack(tokens))
        blocks = self.tree.block_ids(match, match.num_tokens)
        assert len(blocks) == -(-match.num_tokens // self.size)
        for number, block in enumerate(blocks):
            want = tokens[number * self.size : min((number + 1) * self.size, match.num_tokens)]
            owner, held = self.content[block]
            assert owner == namespace and held[: len(want)] == want

    @invariant()
    def the_tree_agrees_with_itself_and_with_the_requests(self):
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        in_tree = [block for block in self.content if block in self.tree]
        held = [block for block in in_tree if self.holders[block]]
        assert self.tree.num_blocks == len(in_tree)
        assert self.tree.num_locked_blocks == len(held)
        assert self.tree.num_evictable_blocks == len(in_tree) - len(held)

    @invariant()
    def watchers_that_would_match_something_else_are_notified(self):
        if not hasattr(self, "tree"):
            return
        changed = self.tree.watchers.take_changed()
        assert len(changed) == len(set(changed)) and self.watching.keys() >= set(changed)
        assert self.tree.watchers.take_changed() == []
        for watcher, (namespace, tokens, match) in self.watching.items():
            assert watcher in changed or self.tree.match_prefix(namespace, pack(tokens)) == match
        for watcher in self.watching.keys() & changed:
            namespace, tokens, _ = self.watching[watcher]
            self.watch_from_now(watcher, namespace, tokens)
        assert len(self.tree.watchers) == len(self.watching)

    def teardown(self):
        if hasattr(self, "tree"):
            for watcher in self.watching:
                self.tree.watchers.unwatch(watcher)
            assert len(self.tree.watchers) == 0
            self.tree.watchers.check_invariants()

    # -- inside -------------------------------------------------------------------------------

    def watch_from_now(self, watcher: int, namespace: str, tokens: list[int]) -> None:
        match = self.tree.match_prefix(namespace, pack(tokens))
        self.tree.watchers.watch(watcher, namespace, pack(tokens), match)
        self.watching[watcher] = namespace, tokens, match

    def draw_running(self, data) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def write(self, request: Running, tokens: list[int], begin: int) -> None:
        """`request` computes tokens[begin:] into its own blocks."""
        for number in range(begin // self.size, -(-len(tokens) // self.size)):
            if number == len(request.blocks):
                block = next(self.fresh)
                request.blocks = [*request.blocks, block]
                self.holders[block] = 1
            block = request.blocks[number]
            self.content[block] = (
                request.namespace,
                tokens[number * self.size : (number + 1) * self.size],
            )
        request.tokens = tokens

    def insert(self, request: Running) -> None:
        tokens = pack(request.tokens)
        before = [
            (entry, self.tree.match_prefix(entry[0], pack(entry[1])).num_tokens)
            for entry in self.inserted
        ]
        taken, evicted = self.insert_into_tree(request, len(request.tokens))
        assert set(taken) <= set(request.blocks)
        assert not any(block in self.tree for block in evicted)
        assert self.tree.match_prefix(request.namespace, tokens).num_tokens == len(request.tokens)
        for (namespace, sequence), length in before:
            assert self.tree.match_prefix(namespace, pack(sequence)).num_tokens >= length
        self.inserted.append((request.namespace, request.tokens))

    def insert_into_tree(self, request: Running, length: int) -> tuple[list[int], list[int]]:
        own_leaf = request.own_leaf if self.tree.can_extend(request.own_leaf, length) else None
        request.own_leaf, taken, evicted, _ = self.tree.insert(
            request.namespace,
            pack(request.tokens[:length]),
            request.blocks[own_leaf.end // self.size if own_leaf else 0 :],
            own_leaf,
        )
        return taken, evicted

    def evicting(self, step) -> list[int]:
        """Run a step that evicts: every sequence keeps what precedes its first evicted block."""
        paths = []
        for namespace, tokens in self.inserted:
            match = self.tree.match_prefix(namespace, pack(tokens))
            blocks = self.tree.block_ids(match, match.num_tokens)
            paths.append((namespace, tokens, match.num_tokens, blocks))
        self.paths_before = [blocks for *_, blocks in paths]
        evicted = step()
        assert len(evicted) == len(set(evicted))
        for namespace, tokens, length, blocks in paths:
            kept = next((i for i, block in enumerate(blocks) if block in evicted), None)
            now = self.tree.match_prefix(namespace, pack(tokens)).num_tokens
            assert now <= length
            assert now >= (length if kept is None else kept * self.size)
        return evicted


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(
    max_examples=examples(300), stateful_step_count=30, deadline=None
)
