"""Random lives of a cache with recurrent groups: the tree against what every block holds.

The model knows of each block its group and the tokens from the first of the sequence to the last in
the block, because what a block holds depends on all of them. Of an attention block it also knows
the number. A state holds the tokens and nothing else: it is of use after exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.components.windows import HOLE, WindowGroup
from sgl_vllm.radix.eviction import POLICIES
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import Match, Node, holder_of
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.effort import examples
from tests.unit.radix.lives import LivesOfATree
from tests.unit.radix.trees import chunks, sliding_window

NAMESPACES = st.sampled_from("xy")
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)
KINDS = [sliding_window(2), sliding_window(5), chunks(4), sliding_window(1000)]

STATE = -1
"""In the place of the number of a block that holds a state."""


@dataclass
class Content:
    """What a block holds. Group 0 is full attention, then come window and recurrent groups."""

    namespace: str
    group: int
    number: int
    tokens: list[int]


@dataclass
class Running:
    """A request that holds blocks: a list for each group of attention, in which `HOLE` is vLLM's
    null block, and by position, a block of each recurrent group. The last of these states is the
    running one, after all its tokens."""

    namespace: str
    tokens: list[int]
    blocks: list[list[int]]
    states: dict[int, list[int]] = field(default_factory=dict)
    own_leaf: Node | None = None

    def held(self) -> list[int]:
        lists = [*self.blocks, *self.states.values()]
        return [block for ids in lists for block in ids if block != HOLE]


class StatesAgainstModel(LivesOfATree):
    """Requests arrive, hold what they hit and go on from there in blocks of their own. What they
    compute and some of their states enter the tree before they give them back."""

    @initialize(
        block_size=st.integers(1, 4),
        num_recurrent_groups=st.integers(1, 3),
        policy=st.sampled_from(["lru", "lru", "slru", "priority"]),
        kinds=st.lists(st.sampled_from(KINDS), max_size=2),
        ratio=st.integers(1, 3),
    )
    def start(
        self,
        block_size: int,
        num_recurrent_groups: int,
        policy: str,
        kinds: list[Callable[[int], int]],
        ratio: int,
    ) -> None:
        """Blocks of the last window group are smaller than the others by `ratio`."""
        self.size = block_size * ratio
        self.sizes = [*[self.size] * max(1, len(kinds)), *[block_size] * (len(kinds) > 0)]
        self.kinds = kinds
        self.recurrent = range(1 + len(kinds), 1 + len(kinds) + num_recurrent_groups)
        self.now = 0.0
        self.tree = RadixTree(
            self.size,
            POLICIES[policy],
            clock=self.clock,
            window_groups=[*map(WindowGroup, self.sizes[1:], kinds)],
            num_recurrent_groups=num_recurrent_groups,
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

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES, first_chunk=st.integers(0, 30))
    def admit(self, data, namespace, tokens, first_chunk):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        limit = len(tokens)
        if data.draw(st.booleans(), "computes more than it must"):
            limit = data.draw(st.integers(0, len(tokens)))
        num_cached = self.tree.longest_hit(match, limit)
        hit = [self.tree.block_ids(match, num_cached), *self.tree.window_ids(match, num_cached)]
        state = self.tree.state_ids(match, num_cached)
        if num_cached:
            all_of_it = data.draw(st.booleans(), "counts as a hit of the whole match")
            used = self.tree.record_hit(match if all_of_it else holder_of(match, num_cached))
            self.tree.record_state_use(used, num_cached)
        request = Running(namespace, tokens[:num_cached], hit)
        if num_cached:
            request.states[num_cached] = state
        for size, ids in zip(self.sizes, hit, strict=True):
            if num_cached % size:  # a copy of the partial last block
                ids[-1] = self.copy(ids[-1], num_cached)
        if num_cached % self.size:  # and of the state
            request.states[num_cached] = [self.copy(block, num_cached) for block in state]
        self.hold(request.held())
        self.running.append(request)
        if data.draw(st.booleans(), "block by block"):
            self.compute_by_blocks(request, tokens)
        else:
            self.compute(request, tokens[: num_cached + first_chunk])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def compute_more(self, data, more):
        request = self.draw_running(data)
        tokens = [*request.tokens, *more]
        if data.draw(st.booleans(), "block by block"):
            self.compute_by_blocks(request, tokens)
            return
        if data.draw(st.booleans(), "gives back what it does not need for that"):
            self.leave_behind(request)
        self.compute(request, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert_with_states(self, data):
        """Less than before, perhaps, and not all states."""
        request = self.draw_running(data)
        length = len(request.tokens)
        if data.draw(st.booleans(), "not all tokens"):
            length = data.draw(st.integers(0, length))
        self.insert(request, length, self.draw_states(data, request, length))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), insert_before=st.booleans())
    def leave_checkpoint(self, data, insert_before):
        """A copy of its running state, which it holds only until the copy is made."""
        request = self.draw_running(data)
        position = len(request.tokens)
        if not position:
            return
        if insert_before:
            self.insert(request, position, {})
        copies = [self.copy(block, position) for block in request.states[position]]
        self.hold(copies)
        self.insert(request, position, {position: copies})
        assert self.tree.states is not None
        self.tree.states.mark(copies[0], data.draw(st.sampled_from(Kind)))
        self.release(copies)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data):
        self.leave_behind(self.draw_running(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        request = self.draw_running(data)
        if keep:
            length = len(request.tokens)
            self.insert(request, length, self.draw_states(data, request, length))
        self.running.remove(request)
        for ids in request.blocks:
            self.release(reversed(ids))
        self.release_states(request, request.states)

    @rule(num_blocks=st.integers(1, 9), data=st.data())
    def evict(self, num_blocks, data):
        wanted: set[Node] = set()
        if self.inserted and data.draw(st.booleans(), "some are wanted"):
            namespace, tokens = data.draw(st.sampled_from(self.inserted))
            node = self.tree.match_prefix(namespace, pack(tokens)).node
            wanted = set() if node is None else {node}
        in_tree = self.blocks_in_tree()
        num_evictable = sum(not self.holders[block] for block in in_tree)
        evicted = self.tree.evict(num_blocks, wanted)
        free = [block for block in evicted if not self.holders[block]]
        assert len(free) >= min(num_blocks, num_evictable)
        assert len(evicted) == len(set(evicted))
        assert in_tree - self.blocks_in_tree() == set(evicted)

    @rule(age=st.integers(0, 40))
    def expire(self, age):
        in_tree = self.blocks_in_tree()
        evicted = self.tree.expire(self.now - age)
        assert len(evicted) == len(set(evicted))
        assert in_tree - self.blocks_in_tree() == set(evicted)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def evict_one(self, data):
        """Of a window group, that is a hole and no more; of a recurrent one, its state; of full
        attention, what continues it."""
        beside = sorted(b for b, held in self.content.items() if held.group and b in self.tree)
        of_full_attention = sorted(self.blocks_in_tree().difference(beside))
        blocks = data.draw(st.sampled_from([beside, of_full_attention])) or sorted(self.content)
        block = data.draw(st.sampled_from(blocks))
        before, gone = self.blocks_in_tree(), self.content[block]
        evicted = self.tree.evict_block(block)
        assert block not in self.tree
        assert self.blocks_in_tree() == before - set(evicted)
        assert len(evicted) == len(set(evicted))
        if block in before and gone.number == STATE:
            assert set(evicted) == self.state_in_tree(gone.namespace, gone.tokens, before)
        elif block in before and gone.group:
            assert evicted == [block]
        for other in map(self.content.__getitem__, evicted):
            if gone.group == 0 and other.number == STATE:
                assert len(other.tokens) > gone.number * self.size, "it was before the block"

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
        assert len(lists) == 1 + len(self.kinds)
        for group, (size, ids) in enumerate(zip(self.sizes, lists, strict=True)):
            assert len(ids) == -(-num_tokens // size)
            num_skipped = self.num_skipped(group, num_tokens) // size
            assert ids[:num_skipped] == [HOLE] * num_skipped
            for number, block in enumerate(ids[num_skipped:], num_skipped):
                held = self.content[block]
                end = min((number + 1) * size, num_tokens)
                assert (held.namespace, held.group, held.number) == (namespace, group, number)
                assert held.tokens[:end] == tokens[:end]
        state = self.tree.state_ids(match, num_tokens)
        expected = [Content(namespace, i, STATE, tokens[:num_tokens]) for i in self.recurrent]
        assert [self.content[block] for block in state] == (expected if num_tokens else [])

    def longest_by_the_model(self, namespace, tokens, num_matched, limit) -> int:
        """Tries every length. An attention block serves if it agrees as far as the match goes, a
        state if it is the one of that length."""
        in_tree = [self.content[block] for block in self.blocks_in_tree()]
        in_tree = [held for held in in_tree if held.namespace == namespace]
        states = {
            (held.group, len(held.tokens))
            for held in in_tree
            if held.number == STATE and held.tokens == tokens[: len(held.tokens)]
        }

        def is_there(group: int, number: int) -> bool:
            end = min((number + 1) * self.sizes[group], num_matched)
            return any(
                (held.group, held.number) == (group, number) and held.tokens[:end] == tokens[:end]
                for held in in_tree
            )

        def has_states(length: int) -> bool:
            return all((group, length) in states for group in self.recurrent)

        def has_windows(length: int) -> bool:
            return all(
                is_there(group, number)
                for group, size in enumerate(self.sizes)
                if group > 0
                for number in range(self.num_skipped(group, length) // size, -(-length // size))
            )

        lengths = range(min(num_matched, limit), 0, -1)
        return next((i for i in lengths if has_states(i) and has_windows(i)), 0)

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
    def what_was_inserted_last_can_be_read_as_far_as_the_model_says(self):
        for namespace, tokens in getattr(self, "inserted", [])[-1:]:
            match, hit = self.hit_of(namespace, tokens)
            expected = self.longest_by_the_model(namespace, tokens, match.num_tokens, len(tokens))
            assert hit == expected

    @invariant()
    def watchers_are_notified_when_a_hit_changes(self):
        """Beside windows, when it becomes as long as its match, or no longer is."""
        if not hasattr(self, "tree"):
            return
        changed = self.tree.watchers.take_changed()
        for watcher, (namespace, tokens, (match, hit)) in self.watching.items():
            if watcher not in changed:
                match_now, hit_now = self.hit_of(namespace, tokens)
                assert match_now == match
                if self.kinds:
                    assert (hit_now == match.num_tokens) == (hit == match.num_tokens)
                else:
                    assert hit_now == hit
        for watcher in self.watching.keys() & changed:
            namespace, tokens, _ = self.watching[watcher]
            self.watch_from_now(watcher, namespace, tokens)

    # -- inside -------------------------------------------------------------------------------

    def draw_running(self, data) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def draw_states(self, data, request: Running, length: int) -> dict[int, list[int]]:
        """Some of the states that a request has after up to `length` tokens, most often all."""
        states = {i: ids for i, ids in request.states.items() if i <= length}
        if states and data.draw(st.integers(0, 3), "0 for not all states") == 0:
            kept = data.draw(st.sets(st.sampled_from(sorted(states))))
            states = {position: states[position] for position in sorted(kept)}
        return states

    def blocks_in_tree(self) -> set[int]:
        return {block for block in self.content if block in self.tree}

    def state_in_tree(self, namespace: str, tokens: list[int], in_tree: set[int]) -> set[int]:
        """The blocks of a state among those that are in the tree."""
        held = [Content(namespace, group, STATE, tokens) for group in self.recurrent]
        return {block for block in in_tree if self.content[block] in held}

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
        if len(tokens) == begin:
            return
        for group, (size, ids) in enumerate(zip(self.sizes, request.blocks, strict=True)):
            for number in range(begin // size, -(-len(tokens) // size)):
                if number == len(ids):
                    ids.append(next(self.fresh))
                    self.holders[ids[number]] = 1
                held = tokens[: (number + 1) * size]
                if ids[number] != HOLE:
                    self.content[ids[number]] = Content(request.namespace, group, number, held)
        self.overwrite_state(request, tokens)
        request.tokens = tokens

    def compute_by_blocks(self, request: Running, tokens: list[int]) -> None:
        """As vLLM does it in mode "align": a pass ends at the end of each block, so there is a
        state."""
        begin = len(request.tokens) // self.size + 1
        for end in (*range(begin * self.size, len(tokens), self.size), len(tokens)):
            self.leave_behind(request)
            self.compute(request, tokens[:end])

    def overwrite_state(self, request: Running, tokens: list[int]) -> None:
        """The running state moves on. At the end of a block vLLM leaves it where it is and goes on
        in the next. A state that is in the tree is not overwritten either."""
        begin = len(request.tokens)
        state = request.states.get(begin)
        if state is not None and begin % self.size and not any(map(self.tree.__contains__, state)):
            del request.states[begin]
        else:
            state = [next(self.fresh) for _ in self.recurrent]
            self.holders.update(dict.fromkeys(state, 1))
        for group, block in zip(self.recurrent, state, strict=True):
            self.content[block] = Content(request.namespace, group, STATE, tokens)
        request.states[len(tokens)] = state

    def leave_behind(self, request: Running) -> None:
        """vLLM gives back what the next tokens do not read. All is inserted before that."""
        length = len(request.tokens)
        self.insert(request, length, {i: ids for i, ids in request.states.items() if i < length})
        for group, ids in enumerate(request.blocks):
            end = min(self.num_skipped(group, length) // self.sizes[group], len(ids))
            gone = ids[:end]
            ids[:end] = [HOLE] * end
            self.release(reversed(gone))
        self.release_states(request, [i for i in request.states if i < length])

    def release_states(self, request: Running, positions: Iterable[int]) -> None:
        """Group by group, as vLLM does it."""
        states = [request.states.pop(position) for position in list(positions)]
        for ids in zip(*states, strict=True):
            self.release(ids)

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] = self.holders.get(block, 0) + 1
        self.tree.lock(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        blocks = [block for block in blocks if block != HOLE]
        for block in blocks:
            self.holders[block] -= 1
        self.tree.unlock([block for block in blocks if not self.holders[block]])

    def insert(self, request: Running, length: int, states: dict[int, list[int]]) -> None:
        own_leaf = request.own_leaf if self.tree.can_extend(request.own_leaf, length) else None
        num_known = own_leaf.end if own_leaf is not None else 0
        full, *windows = [
            ids[num_known // size : -(-length // size)]
            for size, ids in zip(self.sizes, request.blocks, strict=True)
        ]
        before = [(entry, self.hit_of(*entry)[1]) for entry in self.inserted]
        in_tree = self.blocks_in_tree()
        request.own_leaf, taken, evicted, beside = self.tree.insert(
            request.namespace,
            pack(request.tokens[:length]),
            full,
            own_leaf,
            windows=windows,
            states=states,
        )
        of_states = {block for ids in states.values() for block in ids}
        assert {*taken, *beside} <= {*request.held(), *of_states}
        assert self.blocks_in_tree() - in_tree == {*taken, *beside} - in_tree
        assert in_tree - self.blocks_in_tree() == set(evicted)
        if length:
            self.inserted.append((request.namespace, request.tokens[:length]))
            self.watch_from_now(len(self.inserted) % 8, *self.inserted[-1])
        for position in states:  # there is one of each now, and only one
            tokens = request.tokens[:position]
            there = self.state_in_tree(request.namespace, tokens, self.blocks_in_tree())
            assert len(there) == len(self.recurrent)
        if any(HOLE in ids for ids in windows):
            return
        for (namespace, tokens), num_tokens in before:  # no hit becomes shorter
            assert self.hit_of(namespace, tokens)[1] >= num_tokens


TestStatesAgainstModel = StatesAgainstModel.TestCase
TestStatesAgainstModel.settings = settings(
    max_examples=examples(300), stateful_step_count=30, deadline=None
)
