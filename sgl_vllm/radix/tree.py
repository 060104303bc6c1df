"""A radix tree from token ids to the KV-cache blocks that hold their keys and values.

Owns matching, inserting and evicting: which computed tokens are cached, under which namespace, in
which block. Does not own the blocks: the caller says which are in use (`lock`, `unlock`) and reuses
those that the tree evicts. Pure: no vLLM, no torch.

The KV of token `i` of a sequence is in the sequence's block number `i // block_size`, at offset
`i % block_size`. A node holds the tokens `[start, end)` of every sequence that passes through it:

    token       0               8               16              24
    block       |-------0-------|-------1-------|-------2-------|
    root
     └─ A       [0 .................... 13)                         owns block 0
         ├─ B                             [13 . 17)                 owns blocks 1, 2
         └─ C                             [13 ....... 20)           owns blocks 1, 2

Two sequences that diverge inside a block have a block each from there on, and both blocks hold the
shared start: here, with a `block_size` of 8, the KV of [8, 13) is in block 1 of B and in that of C.
So an internal node that ends inside a block owns no block for that part. **Every block belongs to
exactly one node**: a leaf owns the blocks up to its end, an internal node only those that it fills.

A model may have further groups of KV caches: of layers that read only a part of what precedes a
token (`components/windows.py`), and of recurrent layers, which have one state instead of a KV per
token (`components/states.py`). Their blocks are in the same nodes.

A *match* is the longest cached prefix of a sequence. A *hit* is the part of it that a request can
read. It is shorter if a window group lacks blocks, if there is no state at its end, and because at
least one token of a request has to run.

The idea is RadixAttention (Zheng et al., arXiv 2312.07104, section 3), here over paged blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.components.states import RecurrentStates, States
from sgl_vllm.radix.components.windows import WindowGroup, Windows
from sgl_vllm.radix.eviction import EvictionPolicy, lru
from sgl_vllm.radix.eviction_order import EvictionOrder
from sgl_vllm.radix.evictions import EvictionMemory
from sgl_vllm.radix.node import (
    NO_MATCH,
    InsertResult,
    Match,
    Namespace,
    Node,
    block_ids_of,
    descend,
    holder_of,
    subtree,
)
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.radix.watchers import Watchers

_MIN_SCAN_BLOCKS = 64
"""Evicting blocks before locked ones scans all blocks; each scan evicts at least this many."""


class RadixTree:
    """Token-granular index of a prefix cache.

    Matching and inserting cost one dictionary lookup and one `memcmp` per node on the path: linear
    in tokens, at memory bandwidth. Evicting costs O(log n) per leaf.

    Invariant: `check_tree` in `invariants.py`.

    Args:
        block_size: tokens per block of full attention.
        policy: which leaf is evicted first.
        clock: seconds, monotonic.
        window_groups: the groups of layers that read a window.
        num_recurrent_groups: how many groups of recurrent layers there are.
        max_evicted_bytes: host memory for remembering what was evicted, about.

    Attributes:
        num_groups: groups of KV caches, full attention included.
        windows: the blocks of the window groups; None if there are none.
        states: those of the recurrent groups; None if there are none.
        evictions: what was evicted; None if it is not remembered.
        num_tokens: cached tokens.
        num_nodes: nodes that hold tokens, so roots do not count.
        roots: for each namespace that has cached tokens, a node without tokens.
    """

    def __init__(
        self,
        block_size: int,
        policy: EvictionPolicy = lru,
        clock: Callable[[], float] = time.monotonic,
        window_groups: Sequence[WindowGroup] = (),
        num_recurrent_groups: int = 0,
        max_evicted_bytes: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.clock = clock
        self.num_tokens = 0
        self.num_nodes = 0
        self.roots: dict[Namespace, Node] = {}
        self.blocks = BlockTable(block_size)
        self.watchers = Watchers()
        self.num_groups = 1 + len(window_groups) + num_recurrent_groups
        self._num_blocks_per_end = 1 + num_recurrent_groups
        self._num_blocks_per_end += sum(block_size // one.block_size for one in window_groups)
        self.windows = Windows(window_groups, self.blocks, self.watchers) if window_groups else None
        self.states = (
            RecurrentStates(
                num_recurrent_groups, self.blocks, self.watchers, clock, policy is not lru
            )
            if num_recurrent_groups
            else None
        )
        has_tail = self.states.has_useless_end if self.states is not None else None
        self.order = EvictionOrder(policy, self.blocks, has_tail)
        self.shortened: list[int] = []
        """Blocks of which the tree has lost the last tokens but not the first, with states only,
        since the caller last emptied the list."""
        self._namespaces: dict[Node, Namespace] = {}  # of roots
        self.evictions = (
            EvictionMemory(max_evicted_bytes, self._namespaces) if max_evicted_bytes else None
        )
        self._num_created = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that the tree owns, of all groups: locked and evictable ones."""
        return len(self.blocks.owners)

    @property
    def num_states(self) -> int:
        """Prefixes after which the state of recurrent layers is kept."""
        return len(self.states) if self.states is not None else 0

    @property
    def num_locked_blocks(self) -> int:
        """Locked blocks."""
        return len(self.blocks.locked)

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that are not locked. `evict` can evict each of them."""
        return self.blocks.num_evictable

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.blocks.owners

    def nodes(self) -> Iterator[Node]:
        """Every node that holds tokens, parents before children."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)

    # -- match --------------------------------------------------------------------------------

    def match_prefix(self, namespace: Namespace, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens`. Changes nothing."""
        root = self.roots.get(namespace)
        if root is None:
            return NO_MATCH
        node, num_tokens = descend(root, tokens, 0)
        return Match(num_tokens, node) if num_tokens else NO_MATCH

    def longest_hit(self, match: Match, num_tokens: int) -> int:
        """How many tokens of a match a request can read, of at most `num_tokens`: all of them,
        unless a window group lacks blocks or there is no state. `match` is made since the last
        change."""
        num_tokens = min(match.num_tokens, num_tokens)
        while num_tokens > 0:
            if self.windows is not None:
                num_tokens = self.windows.longest_hit(match, num_tokens)
            if self.states is None:
                return num_tokens
            position = self.states.longest_hit(match, num_tokens)
            if position == num_tokens:
                return num_tokens
            num_tokens = position  # where a window group may lack other blocks
        return 0

    def block_ids(self, match: Match, num_tokens: int) -> list[int]:
        """The blocks that hold the first `num_tokens` of a match made since the last change.

        Block `j` of them holds tokens `[j * block_size, min((j + 1) * block_size, num_tokens))`,
        so there are ceil(num_tokens / block_size). The last may hold more tokens than asked for.
        """
        return block_ids_of(match, num_tokens, self.block_size)

    def window_ids(self, match: Match, num_tokens: int) -> list[list[int]]:
        """For each window group its blocks of a `longest_hit`, from number 0 on: `HOLE` for those
        that the hit does not need."""
        return self.windows.block_ids(match, num_tokens) if self.windows is not None else []

    def state_ids(self, match: Match, num_tokens: int) -> list[int]:
        """For each recurrent group the block of the state after `num_tokens`, of a `longest_hit` of
        at least one token."""
        return self.states.block_ids(match, num_tokens) if self.states is not None else []

    def record_hit(self, match: Match, priority: int = 0) -> Match:
        """A request of `priority` uses what it matched. A node that is used in part is split, so
        that hits and ages are those of the tokens of `match`, which may be older than the last
        change. Returns the match as it is now."""
        num_tokens, node = holder_of(match, match.num_tokens)
        if node is None or node.parent is None:
            return NO_MATCH
        if node.start < num_tokens < node.end:
            node = self._split(node, num_tokens)
        self._record_use(node, priority, num_hits=1)
        return Match(num_tokens, node)

    def record_state_use(self, match: Match, num_tokens: int) -> None:
        """A request goes on from the state after the first `num_tokens` of what it matched."""
        node = holder_of(match, num_tokens).node
        if self.states is not None and node is not None:
            self.states.used(node, num_tokens)

    def record_use(self, node: Node | None, priority: int = 0) -> None:
        """A request of `priority` has just used the tokens of `node` and of all its parents."""
        self._record_use(node, priority, num_hits=0)

    def _record_use(self, node: Node | None, priority: int, num_hits: int) -> None:
        now = self.clock()
        while node is not None:
            node.num_hits += num_hits
            node.last_used = now
            if priority < node.priority:
                node.priority = priority
            node = node.parent

    def record_end(self, leaf: Node, num_users: int = 0) -> None:
        """No sequence will extend `leaf` again: what only led to it counts as never used.

        In a session, each request reads one node more than the one before. A node that more
        requests have read than that is of use to others. So is one that `num_users` have used, if
        that is 2 or more, counting the request that computed it: the first branch of a fork to end
        has read its parent's prefix as often as if it were its own.
        """
        node, parent = leaf, leaf.parent
        if node.children:
            return
        while parent is not None:
            num_hits = node.num_hits
            node.count_as_never_used()
            self.order.forget(node)
            if self.states is not None:
                self.states.count_as_never_used(node)
            if self.blocks.is_evictable(node):
                self.order.add(node)
            if len(parent.children) > 1 or parent.num_hits > num_hits + 1:
                return
            if 2 <= num_users <= parent.num_hits + 1:
                return
            node, parent = parent, parent.parent

    # -- insert -------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_ids: Sequence[int],
        own_leaf: Node | None = None,
        priority: int = 0,
        windows: Sequence[Sequence[int]] = (),
        states: States | None = None,
    ) -> InsertResult:
        """Record that `block_ids` hold the KV of `tokens`, from the first token on.

                       0         own_leaf.end        matched              n
            tokens     |-- known -----|---- cached ------|---- new -------)
            block_ids              [---- duplicates ---------|-- taken ----]

        Blocks of cached tokens stay as they are, and the caller's duplicates are not taken. The
        blocks taken are in use by the caller, so they are locked. If a leaf ends inside a block
        that `tokens` continue, the caller's longer copy of the block replaces it.

        Args:
            tokens: all n of the sequence.
            block_ids: the blocks from number 0 on (with `own_leaf` from `own_leaf.end //
                block_size` on) up to number ceil(n / block_size) - 1 or more. A block that is in
                the tree already must be at the same place there.
            own_leaf: from the result of the caller's last insert of a prefix of `tokens`, if
                `can_extend` holds. Saves the way down from the root, and lets the leaf grow.
            windows: required if the tree has window groups: for each of them its blocks, numbered
                like `block_ids` but by its own block size; `HOLE` for those that the caller does
                not have. They also fill holes of cached tokens.
            states: states after prefixes of `tokens`, at positions in (0, n].

        Raises:
            ValueError: too few blocks for the tokens, a position outside (0, n], or a block that is
                elsewhere in the tree. In the last case the tree may be changed in part.
        """
        size = self.block_size
        num_tokens = len(tokens) // TOKEN_BYTES
        num_known = own_leaf.end if own_leaf is not None else 0
        first_block = num_known // size
        if (first_block + len(block_ids)) * size < num_tokens:
            num_blocks = first_block + len(block_ids)
            raise ValueError(f"{num_tokens} tokens need more than {num_blocks} blocks of {size}")
        if states and (min(states) <= 0 or max(states) > num_tokens):
            raise ValueError(f"states at {[*states]} are not all in (0, {num_tokens}]")
        if own_leaf is not None:
            node, matched = descend(own_leaf, tokens, own_leaf.end)
        else:
            root = self.roots.get(namespace)
            if root is None:
                if not num_tokens:
                    return InsertResult(None, [], [])
                root = self.roots[namespace] = Node(None, 0, b"", [], 0)
                self._namespaces[root] = namespace
                if self.evictions is not None:
                    self.evictions.root_added(root)
            node, matched = descend(root, tokens, 0)
        taken_other_groups: list[int] = []
        if self.windows is not None:
            taken_other_groups = self.windows.fill(node, matched, windows, num_known, own_leaf)
        if matched == num_tokens:
            taken_other_groups += self._add_states(node, states)
            return InsertResult(own_leaf if node is own_leaf else None, [], [], taken_other_groups)
        if matched < node.end:
            node = self._split(node, matched)
        begin, end = matched // size - first_block, -(-num_tokens // size) - first_block
        taken = list(block_ids[begin:end])
        # The leaf's partial last block holds the first tokens of the first of these. If both are
        # the same block, the tree has it already; if not, the longer copy replaces it.
        has_tail = matched % size != 0 and not node.children
        tail = node.block_ids[-1] if has_tail else None
        must_be_new = taken[1:] if taken[0] == tail else taken
        if not self.blocks.owners.keys().isdisjoint(must_be_new):
            raise ValueError(f"one of the blocks {taken} is already in the tree, at another place")
        new_tokens = tokens[matched * TOKEN_BYTES :]
        evicted: list[int] = []
        tail_owner = node if has_tail else None
        if node is own_leaf and not node.children and (tail is None or tail == taken[0]):
            taken = must_be_new
            self._grow_leaf(node, new_tokens, taken)
        else:
            if tail is not None:
                node.block_ids.pop()
                self.blocks.remove([tail])
                if tail != taken[0]:
                    evicted.append(tail)
            node = self._add_leaf(namespace, node, new_tokens, taken, priority)
        node.last_used = self.clock()
        self.blocks.add(taken, node)
        self.num_tokens += num_tokens - matched
        if self.windows is not None:
            taken_windows, replaced = self.windows.append(
                node, matched, windows, num_known, tail_owner
            )
            self.windows.grew(node, matched)
            taken_other_groups += taken_windows
            evicted += replaced
        if self.states is not None:
            self.states.grew(node, matched)
            taken_other_groups += self._add_states(node, states)
        return InsertResult(node, taken, evicted, taken_other_groups)

    def _grow_leaf(self, leaf: Node, tokens: Tokens, block_ids: Sequence[int]) -> None:
        self.watchers.notify(leaf, tokens[:TOKEN_BYTES])
        old_end = leaf.end
        leaf.tokens += tokens
        leaf.end += len(tokens) // TOKEN_BYTES
        leaf.block_ids += block_ids
        if self.evictions is not None and leaf.evicted:
            self.evictions.cached_again(leaf.evicted, leaf, old_end)

    def _add_leaf(
        self,
        namespace: Namespace,
        parent: Node,
        tokens: Tokens,
        block_ids: Sequence[int],
        priority: int,
    ) -> Node:
        leaf = Node(parent, parent.end, tokens, [*block_ids], priority)
        if self.windows is not None:
            leaf.windows = self.windows.no_blocks()
        if self.states is not None:
            leaf.states = {}
        first_token = tokens[:TOKEN_BYTES]
        parent.children[first_token] = leaf
        self._count(leaf)
        evicted = parent.evicted
        if self.evictions is not None and evicted and (leaf.start, first_token) in evicted:
            self.evictions.cached_again(evicted, leaf, leaf.start)
        self.watchers.notify(namespace if parent.parent is None else parent, first_token)
        return leaf

    def _add_states(self, node: Node, states: States | None) -> list[int]:
        """States of a sequence that ends in `node`. Returns the blocks taken."""
        if self.states is None or not states:
            return []
        return self.states.add(node, states)

    @staticmethod
    def can_extend(own_leaf: Node | None, num_tokens: int) -> bool:
        """Whether an insert of `num_tokens` may start from `own_leaf`: it is still in the tree, and
        ends at or before them."""
        return own_leaf is not None and own_leaf.parent is not None and own_leaf.end <= num_tokens

    def _split(self, node: Node, position: int) -> Node:
        """Split `node` at sequence `position` and return the new upper half."""
        parent = node.parent
        assert parent is not None and node.start < position < node.end
        self.watchers.notify(node)
        num_upper_blocks = position // self.block_size - node.start // self.block_size
        cut = (position - node.start) * TOKEN_BYTES
        upper = Node(
            parent, node.start, node.tokens[:cut], node.block_ids[:num_upper_blocks], node.priority
        )
        upper.num_hits, upper.last_used = node.num_hits, node.last_used
        self.blocks.assign(upper.block_ids, upper)
        parent.children[upper.tokens[:TOKEN_BYTES]] = upper
        node.parent, node.start = upper, position
        node.tokens = node.tokens[cut:]
        del node.block_ids[:num_upper_blocks]
        if self.windows is not None:
            self.windows.split(node, upper)
        if self.states is not None:
            self.states.split(node, upper)
        if self.evictions is not None and node.evicted:
            self.evictions.split(node, upper)
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        self._count(upper)
        return upper

    def _count(self, node: Node) -> None:
        self.num_nodes += 1
        self._num_created += 1
        node.serial = self._num_created

    # -- lock ---------------------------------------------------------------------------------

    def lock(self, block_ids: Iterable[int]) -> None:
        """Evict neither these blocks nor those before them in their sequences. Ids that are not in
        the tree are ignored."""
        self.blocks.lock(block_ids)

    def unlock(self, block_ids: Sequence[int]) -> None:
        """These blocks are in use no longer. Ids that are not in the tree are ignored."""
        for leaf in self.blocks.unlock(block_ids):
            self.order.add(leaf)
        if self.windows is not None:
            self.windows.unlocked(block_ids)
        if self.states is not None:
            self.states.unlocked(block_ids)

    # -- evict --------------------------------------------------------------------------------

    def evict(self, num_blocks: int, wanted: Collection[Node] = ()) -> list[int]:
        """Evict `num_blocks` that are not locked, or as many as there are, in this order:

        1. spare blocks of window groups (`components/windows.py`), of `wanted` nodes too;
        2. partial last blocks of leaves, least recently used first; with recurrent groups those in
           which no hit can end instead, whole or partial;
        3. with recurrent groups states, in their own order (`components/state_order.py`), each with
           the end of a leaf that is of no use without it. If the policy is another than LRU, spare
           states only;
        4. leaves from their end, in the order of the policy;
        5. blocks before locked ones. Costs a scan of all blocks.

        In 2 to 4, nodes in `wanted` come after all others.

        Blocks before locked ones are of two kinds. Window blocks that the end of a locked node
        needs are evicted alone. Full-attention blocks of an ended request are left if a running one
        has the same tokens in blocks of its own, and only what continues them is in the tree. They
        are evicted with everything that continues them, locked or not.

        Returns every block evicted, in case 5 possibly more than `num_blocks`. With several groups
        there may be more in any case, because the blocks at the end of a leaf go together, and with
        recurrent groups all after the last state that is left.
        """
        if self.evictions is not None:
            self.evictions.begin("evicted", self.clock())
        evicted: list[int] = []
        num_left = min(num_blocks, self.num_evictable_blocks)
        if self.windows is not None and num_left > 0:
            evicted += self.windows.evict_spare(num_left)
            num_left -= len(evicted)
        while num_left > 0:
            num_before = self.num_evictable_blocks
            if self.states is not None and (cut := self._evict_state(self.states, wanted)):
                evicted += cut
                num_left -= num_before - self.num_evictable_blocks  # some may be in use
                continue
            leaf = self.order.pop(wanted)
            if leaf is not None and self.num_groups == 1:
                cut = self._evict_end(leaf, 1 if leaf.end % self.block_size else num_left)
                num_left -= len(cut)
                evicted += cut
            elif leaf is not None:
                is_tail = leaf.end % self.block_size != 0
                num_ends = 1 if is_tail else -(-num_left // self._num_blocks_per_end)
                evicted += self._evict_end(leaf, num_ends)
                num_left -= num_before - self.num_evictable_blocks  # of windows, some are in use
            elif wanted:
                wanted = ()  # only wanted leaves are left
            else:
                self._evict_before_locked(max(num_left, _MIN_SCAN_BLOCKS), evicted)
                break
        return evicted

    def _evict_state(self, states: RecurrentStates, wanted: Collection[Node]) -> list[int]:
        """Evict the end of a leaf in which no hit can end, or else a state, with the end of a leaf
        that is of no use without it. Returns the blocks; none if there is neither."""
        while (leaf := self.order.pop(wanted, only_tails=True)) is not None:
            if cut := self._evict_end(leaf, 1):  # or its parent has got the block
                return cut
        block_id = states.take_first(wanted)
        if block_id is None:
            return []
        if not states.is_last(block_id):
            return states.drop(block_id)
        return self._evict_end(self.blocks.owners[block_id], 1)

    def _evict_before_locked(self, num_blocks: int, evicted: list[int]) -> None:
        unlocked = [i for i in self.blocks.owners if i not in self.blocks.locked]
        if self.num_groups > 1:
            unlocked.sort(key=self._cuts_nothing_off, reverse=True)
        for block_id in unlocked:
            if num_blocks <= 0:
                break
            num_before = self.num_evictable_blocks
            evicted += self._evict_block(block_id)
            num_blocks -= num_before - self.num_evictable_blocks

    def _cuts_nothing_off(self, block_id: int) -> bool:
        """Whether it can be evicted alone: it is of no group of full attention."""
        return (self.windows is not None and block_id in self.windows) or (
            self.states is not None and block_id in self.states
        )

    def expire(self, unused_since: float) -> list[int]:
        """Evict what is not locked and has not been used since `unused_since`, on the tree's clock.

        The first call starts the bookkeeping that later ones need: O(nodes). Later calls cost
        O(log n) per leaf evicted, and O(1) if there is none.
        """
        if not self.order.may_expire:
            self.order.expire_from(filter(self.blocks.is_evictable, self.nodes()))
        if self.evictions is not None:
            self.evictions.begin("expired", self.clock())
        evicted: list[int] = []
        while (leaf := self.order.pop_unused_since(unused_since)) is not None:
            evicted += self._evict_end(leaf, len(leaf.block_ids))
        return evicted

    def evict_block(self, block_id: int) -> list[int]:
        """Evict `block_id`, whose contents are wrong, and all that continues it, locked or not.
        Nothing continues the block of a window group; with one of a recurrent group goes the state
        that it is part of.

        Returns every block evicted; none if `block_id` is not in the tree.
        """
        if self.evictions is not None:
            self.evictions.begin(None)
        return self._evict_block(block_id)

    def _evict_block(self, block_id: int) -> list[int]:
        node = self.blocks.owners.get(block_id)
        if node is None:
            return []
        if self.windows is not None and block_id in self.windows:
            self.windows.make_hole(block_id)
            return [block_id]
        if self.states is not None and block_id in self.states:
            return self.states.drop(block_id)
        evicted: list[int] = []
        for child in node.children.values():
            self._remove_subtree(child, evicted)
        node.children = {}
        number = node.start // self.block_size + node.block_ids.index(block_id)
        return evicted + self._cut(node, number * self.block_size)

    def clear(self) -> None:
        """Remove everything. O(nodes)."""
        if self.evictions is not None:
            self.evictions.begin("flushed", self.clock())
        for node in self.nodes():
            if self.evictions is not None:
                self.evictions.node_left(node)
            node.parent = None
            if node.context is not None:
                node.context.leaf = None
        self.watchers.notify_all()
        self.roots.clear()
        self._namespaces.clear()
        self.blocks.clear()
        if self.windows is not None:
            self.windows.clear()
        if self.states is not None:
            self.states.clear()
        self.order.clear()
        self.num_tokens = 0
        self.num_nodes = 0

    def _evict_end(self, leaf: Node, num_blocks: int) -> list[int]:
        """Evict up to `num_blocks` unlocked blocks of full attention from the end of `leaf`, with
        the other groups' blocks of the same tokens; more if no state is left at the end then."""
        num_kept = len(leaf.block_ids)
        min_kept = max(0, num_kept - num_blocks)
        if self.states is not None:
            min_kept = min(min_kept, self.states.num_blocks_to_last_kept_state(leaf))
        while num_kept > min_kept and leaf.block_ids[num_kept - 1] not in self.blocks.locked:
            num_kept -= 1
        if num_kept == 0 and self.states is not None:
            self._leave_shared_block(leaf)
        return self._cut(leaf, (leaf.start // self.block_size + num_kept) * self.block_size)

    def _end_of_own_blocks(self, node: Node) -> int:
        """How many tokens of the sequences through `node` are in its own blocks and those before
        them."""
        end = (node.start // self.block_size + len(node.block_ids)) * self.block_size
        return min(end, node.end)

    def _leave_shared_block(self, leaf: Node) -> None:
        """Give the parent of a leaf the block that they share, if the leaf is its only child, so
        that the state at the parent's end stays of use."""
        parent = leaf.parent
        assert parent is not None
        if leaf.start % self.block_size == 0 or leaf.start not in parent.states:
            return
        if len(parent.children) == 1:
            block_id = leaf.block_ids.pop(0)
            parent.block_ids.append(block_id)
            self.blocks.assign([block_id], parent)
            self.shortened.append(block_id)
            if self.windows is not None:
                self.shortened += self.windows.move_first(leaf, parent)

    def _remove_subtree(self, top: Node, evicted: list[int]) -> None:
        for node in subtree(top):
            self.watchers.notify(node)
            self._remove(node, evicted)

    def _remove(self, node: Node, evicted: list[int]) -> None:
        """Remove `node` but for its entry in its parent's children."""
        evicted += node.block_ids
        self.blocks.remove(node.block_ids)
        if self.evictions is not None:
            self.evictions.node_left(node)
        if self.windows is not None:
            evicted += self.windows.cut(node, node.start)
        if self.states is not None:
            evicted += self.states.cut(node, node.start)
        self.num_tokens -= node.end - node.start
        self.num_nodes -= 1
        node.parent = None
        if node.context is not None:
            node.context.leaf = None  # `_cut` may move it up

    def _cut(self, node: Node, end: int) -> list[int]:
        """Shorten childless `node` to block-aligned `end`. Remove it if nothing is left of it, and
        shorten parents whose last tokens were in its blocks only.

        Returns the blocks evicted. What is a leaf now can be evicted next.
        """
        evicted: list[int] = []
        while end <= node.start:
            parent = node.parent
            assert parent is not None
            self.watchers.notify(node)
            if self.windows is not None:  # it may have held the part of a block that they share
                self.windows.notify_above(node, node.start - node.start % self.block_size)
            self._remove(node, evicted)
            del parent.children[node.tokens[:TOKEN_BYTES]]
            if parent.parent is None and not parent.children:
                del self.roots[self._namespaces.pop(parent)]
            if parent.parent is None or parent.children:
                return evicted
            if node.context is not None:
                node.context.move_to(parent)
            node, end = parent, self._end_of_own_blocks(parent)
        if end < node.end:
            self.watchers.notify(node)
            num_kept = end // self.block_size - node.start // self.block_size
            cut = node.block_ids[num_kept:]
            self.blocks.remove(cut)
            evicted += cut
            del node.block_ids[num_kept:]
            if self.windows is not None:
                evicted += self.windows.cut(node, end)
            if self.states is not None:
                evicted += self.states.cut(node, end)
            if self.evictions is not None:
                self.evictions.end_left(node, end)
            self.num_tokens -= node.end - end
            node.tokens = node.tokens[: (end - node.start) * TOKEN_BYTES]
            node.end = end
        if self.blocks.is_evictable(node):
            self.order.add(node)
        return evicted
