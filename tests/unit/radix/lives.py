"""What the random lives of a cache have in common: what every block holds, and what requests do.

The model knows of each block its group, its number, and the tokens from the first of the sequence
to the last in the block, because what a block holds depends on all of them. A state holds the
tokens and nothing else: it is of use after exactly these. There may be window groups, whose blocks
have sizes of their own, recurrent groups, both or neither. Or all groups are windows: then nobody
has a block of group 0, and the blocks of the first window group are as long as those would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any  # Any: hypothesis's `data`

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from sgl_vllm.radix.components.windows import WindowGroup
from sgl_vllm.radix.eviction_policies import POLICIES
from sgl_vllm.radix.node import HOLE, Match, Node
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import chunks, sliding_window

KINDS = [*map(sliding_window, (2, 3, 7, 1000)), *map(chunks, (3, 4, 8))]

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


class LifeOfATree(RuleBasedStateMachine):
    """A tree of any kind, and the model of it."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
        num_recurrent_groups=st.sampled_from([0, 0, 1, 2]),
        policy=st.sampled_from(["lru", *sorted(POLICIES)]),
        kinds=st.lists(st.sampled_from(KINDS), max_size=3),
        memory=st.sampled_from([0, 1 << 11, 1 << 20]),
        has_full_attention=st.sampled_from([True, True, False]),
        data=st.data(),
    )
    def start(
        self,
        block_size: int,
        num_recurrent_groups: int,
        policy: str,
        kinds: list[Callable[[int], int]],
        memory: int,
        has_full_attention: bool,
        data: Any,
    ) -> None:
        self.size = block_size
        self.has_full_attention = has_full_attention
        if not has_full_attention:
            num_recurrent_groups = 0
            kinds = kinds or [data.draw(st.sampled_from(KINDS))]
        sizes = [size for size in range(1, block_size + 1) if block_size % size == 0]
        self.sizes = [block_size, *(data.draw(st.sampled_from(sizes)) for _ in kinds)]
        if not has_full_attention:
            self.sizes[1] = block_size
        self.kinds = kinds
        self.recurrent = range(1 + len(kinds), 1 + len(kinds) + num_recurrent_groups)
        self.now = 0.0
        self.tree = RadixTree(
            block_size,
            POLICIES[policy],
            clock=self.clock,
            window_groups=[*map(WindowGroup, self.sizes[1:], kinds)],
            num_recurrent_groups=num_recurrent_groups,
            max_evicted_bytes=memory,
            has_full_attention=has_full_attention,
        )
        self.content: dict[int, Content] = {}
        self.holders: dict[int, int] = {}
        self.running: list[Running] = []
        self.inserted: list[tuple[str, list[int]]] = []
        self.watching: dict[int, tuple[str, list[int], tuple[Match, int]]] = {}
        self.wanted: set[Node] = set()
        self.fresh = count()

    def clock(self) -> float:
        self.now += 1
        return self.now

    # -- the model ----------------------------------------------------------------------------

    def blocks_in_tree(self) -> set[int]:
        return {block for block in self.content if block in self.tree}

    def num_skipped(self, group: int, num_tokens: int) -> int:
        return self.kinds[group - 1](num_tokens) if group else 0

    def held_of(self, namespace: str, tokens: list[int]) -> Mapping[tuple[int, int], int]:
        """By group and block number, how many of these tokens the best block in the tree has, from
        the first on. States have minus their length in place of the number."""
        held: dict[tuple[int, int], int] = {}
        for one in map(self.content.__getitem__, self.blocks_in_tree()):
            if one.namespace == namespace:
                pairs = zip(one.tokens, tokens, strict=False)
                num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if one.number != STATE:
                    key = one.group, one.number
                    held[key] = max(num_same, held.get(key, 0))
                elif num_same == len(one.tokens):
                    held[one.group, -num_same] = num_same
        return held

    def is_readable(self, held: Mapping[tuple[int, int], int], length: int, matched: int) -> bool:
        """Whether there are all states and window blocks of a hit of this length. A block serves if
        it agrees as far as the match goes, a state if it is the one of that length."""
        return all((group, -length) in held for group in self.recurrent) and all(
            held.get((group, number), 0) >= min((number + 1) * size, matched)
            for group, size in enumerate(self.sizes[1:], 1)
            for number in range(self.num_skipped(group, length) // size, -(-length // size))
        )

    def longest_by_the_model(self, namespace, tokens, num_matched, limit) -> int:
        held, lengths = self.held_of(namespace, tokens), range(min(num_matched, limit), 0, -1)
        return next((i for i in lengths if self.is_readable(held, i, num_matched)), 0)

    def state_in_tree(self, namespace: str, tokens: list[int], in_tree: set[int]) -> set[int]:
        """The blocks of a state among those that are in the tree."""
        held = [Content(namespace, group, STATE, tokens) for group in self.recurrent]
        return {block for block in in_tree if self.content[block] in held}

    # -- what requests do ---------------------------------------------------------------------

    def hit_of(self, namespace: str, tokens: list[int]) -> tuple[Match, int]:
        match = self.tree.match_prefix(namespace, pack(tokens))
        return match, self.tree.longest_hit(match, len(tokens))

    def watch_from_now(self, watcher: int, namespace: str, tokens: list[int]) -> None:
        match = self.tree.match_prefix(namespace, pack(tokens))
        self.tree.watchers.watch(watcher, namespace, pack(tokens), match)
        self.watching[watcher] = namespace, tokens, self.hit_of(namespace, tokens)

    def draw_continuation(
        self, data: Any, namespace: str, tokens: list[int]
    ) -> tuple[str, list[int]]:
        if self.inserted and data.draw(st.integers(0, 3), "0 if it shares by chance only"):
            namespace, earlier = data.draw(st.sampled_from(self.inserted))
            length = len(earlier) - data.draw(st.integers(0, len(earlier) - 1), "so many cut off")
            tokens = [*earlier[:length], *tokens[:9]]
        return namespace, tokens

    def draw_running(self, data: Any) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def draw_states(self, data: Any, request: Running, length: int) -> dict[int, list[int]]:
        """Some of the states that a request has after up to `length` tokens, most often all."""
        states = {i: ids for i, ids in request.states.items() if i <= length}
        if states and data.draw(st.integers(0, 3), "0 for not all states") == 0:
            kept = data.draw(st.sets(st.sampled_from(sorted(states))))
            states = {position: states[position] for position in sorted(kept)}
        return states

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
                if number == len(ids) and not (group or self.has_full_attention):
                    ids.append(HOLE)
                elif number == len(ids):
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
        before = [(entry, self.hit_of(*entry)) for entry in self.inserted]
        in_tree, tokens = self.blocks_in_tree(), pack(request.tokens[:length])
        request.own_leaf, taken, evicted = self.tree.insert(
            request.namespace, tokens, full, own_leaf, windows=windows, states=states
        )
        of_states = {block for ids in states.values() for block in ids}
        assert {*taken} <= {*request.held(), *of_states}
        assert self.blocks_in_tree() - in_tree == {*taken} - in_tree
        assert in_tree - self.blocks_in_tree() == set(evicted)
        assert self.tree.match_prefix(request.namespace, tokens).num_tokens == length
        if length:
            self.inserted.append((request.namespace, request.tokens[:length]))
            self.watch_from_now(len(self.inserted) % 8, *self.inserted[-1])
        for position in states:  # there is one of each now, and only one
            of_state = request.tokens[:position]
            there = self.state_in_tree(request.namespace, of_state, self.blocks_in_tree())
            assert len(there) == len(self.recurrent)
        for entry, (match, hit) in before:  # nothing becomes shorter
            match_now, hit_now = self.hit_of(*entry)
            assert match_now.num_tokens >= match.num_tokens
            assert hit_now >= hit or any(HOLE in ids for ids in windows)

    def is_end_of_a_shared_block(self, namespace: str, tokens: list[int], least: int) -> bool:
        """A useless leaf's first block goes to its parent, which has a state there: the block
        stays, but the leaf's tokens in it are gone."""
        state = self.state_in_tree(namespace, tokens, self.blocks_in_tree())
        return bool(state) and least - len(tokens) < self.size

    def evicting(
        self, step: Callable[[], list[int]], begin: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        """Run a step that evicts: every sequence keeps what precedes its first evicted block, and
        without full attention the tokens before `begin`. Returns the blocks of full attention that
        each sequence had, and all those evicted."""
        paths, in_tree = [], self.blocks_in_tree()
        for namespace, tokens in self.inserted:
            match = self.tree.match_prefix(namespace, pack(tokens))
            paths.append((match.num_tokens, self.tree.block_ids(match, match.num_tokens)))
        evicted = step()
        assert len(evicted) == len(set(evicted))
        assert in_tree - self.blocks_in_tree() == set(evicted)
        for (namespace, tokens), (length, blocks) in zip(self.inserted, paths, strict=True):
            kept = next((i for i, block in enumerate(blocks) if block in evicted), None)
            now = self.tree.match_prefix(namespace, pack(tokens)).num_tokens
            least = length if kept is None else kept * self.size
            if not self.has_full_attention:
                least = min(length, begin)
            assert now <= length
            assert now >= least or self.is_end_of_a_shared_block(namespace, tokens[:now], least)
        return [blocks for _, blocks in paths], evicted
