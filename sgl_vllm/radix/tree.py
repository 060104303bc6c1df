"""A radix tree from token ids to the KV-cache blocks that hold their keys and values.

Owns matching and evicting: what a request finds under its namespace, and what goes first. Does not
own what a node is (`node.py`), how nodes are inserted and removed (`prefix_tree.py`), nor the
blocks: the caller says which are in use (`lock`, `unlock`) and reuses those that the tree evicts.
Pure: no vLLM, no torch.

A model may have further groups of KV caches: of layers that read only a part of what precedes a
token (`components/windows.py`), and of recurrent layers, which have one state instead of a KV per
token (`components/states.py`). Their blocks are in the same nodes.

A *match* is the longest cached prefix of a sequence. A *hit* is the part of it that a request can
read. It is shorter if a window group lacks blocks, if there is no state at its end, and because at
least one token of a request has to run.

The idea is RadixAttention (Zheng et al., arXiv 2312.07104, section 3), here over paged blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.components.states import RecurrentStates
from sgl_vllm.radix.node import (
    HOLE,
    NO_MATCH,
    Match,
    Namespace,
    Node,
    descend,
    first_block_below,
    holder_of,
    path_to,
)
from sgl_vllm.radix.prefix_tree import PrefixTree
from sgl_vllm.radix.tokens import Tokens

_MIN_SCAN_BLOCKS = 64
"""Evicting blocks before locked ones scans all blocks; each scan evicts at least this many."""


class RadixTree(PrefixTree):
    """What requests find in the tree, and what is evicted.

    Matching costs one dictionary lookup and one `memcmp` per node on the path, evicting O(log n)
    per leaf. The arguments and attributes are those of `PrefixTree`.

    Invariant: `check_tree` in `invariants.py`.
    """

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
        longest = min(match.num_tokens, num_tokens)
        while longest > 0:
            before = longest
            for component in self.components:
                longest = component.longest_hit(match, longest)
            if longest == before or len(self.components) == 1:
                return longest  # what states leave may lack other blocks of a window group
        return 0

    def block_ids(self, match: Match, num_tokens: int) -> list[int]:
        """The blocks that hold the first `num_tokens` of a match made since the last change.

        Block `j` of them holds tokens `[j * block_size, min((j + 1) * block_size, num_tokens))`,
        so there are ceil(num_tokens / block_size). The last may hold more tokens than asked for.
        """
        path = path_to(match.node)
        block_ids: list[int] = []
        for node in path:
            block_ids += node.block_ids
        num_blocks = -(-num_tokens // self.block_size)
        if len(block_ids) < num_blocks:  # the match ends in a block that children of the node own
            block_ids.append(first_block_below(path[-1]))
        del block_ids[num_blocks:]
        return block_ids

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
        self.record_use(node, priority, num_hits=1)
        return Match(num_tokens, node)

    def record_state_use(self, match: Match, num_tokens: int) -> None:
        """A request goes on from the state after the first `num_tokens` of what it matched."""
        node = holder_of(match, num_tokens).node
        if self.states is not None and node is not None:
            self.states.used(node, num_tokens)

    def mark_state(self, block_id: int, kind: Kind) -> None:
        """The state that a block is part of was left in a place of this kind."""
        if self.states is not None:
            self.states.mark(block_id, kind)

    def record_use(self, node: Node | None, priority: int = 0, num_hits: int = 0) -> None:
        """A request of `priority` has just used the tokens of `node` and of all its parents, which
        counts as `num_hits`."""
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
            self._count_as_never_used(node)
            if len(parent.children) > 1 or parent.num_hits > num_hits + 1:
                return
            if 2 <= num_users <= parent.num_hits + 1:
                return
            node, parent = parent, parent.parent

    def record_drop(self, leaf: Node, num_tokens: int) -> None:
        """No sequence will extend `leaf` past its first `num_tokens`: whole blocks after them count
        as never used."""
        begin = -(-num_tokens // self.block_size) * self.block_size
        if leaf.start < begin < leaf.end:
            self._split(leaf, begin)
        if begin <= leaf.start and not leaf.children:
            self._count_as_never_used(leaf)

    def _count_as_never_used(self, node: Node) -> None:
        node.count_as_never_used()
        self.order.forget(node)
        for component in self.components:
            component.count_as_never_used(node)
        if self.blocks.is_evictable(node):
            self.order.add(node)

    def keep(self, namespace: Namespace, tokens: Tokens, keep_s: float) -> None:
        """Keep the cached whole blocks of `tokens` for `keep_s` seconds: other leaves of the
        namespace are evicted first, if possible (`kept.py`)."""
        match = self.match_prefix(namespace, tokens)
        num_tokens = match.num_tokens // self.block_size * self.block_size
        node = holder_of(match, num_tokens).node
        if not self.kept.max_blocks or node is None or node.parent is None:
            return
        if num_tokens < node.end:
            node = self._split(node, num_tokens)
        self.kept.mark(path_to(node), self.clock() + keep_s)

    # -- lock ---------------------------------------------------------------------------------

    def lock(self, block_ids: Iterable[int]) -> None:
        """Evict neither these blocks nor those before them in their sequences, as long as `evict`
        has anything else. Ids that are not in the tree are ignored."""
        self.blocks.lock(block_ids)

    def unlock(self, block_ids: Sequence[int]) -> None:
        """These blocks are in use no longer. Ids that are not in the tree are ignored."""
        for leaf in self.blocks.unlock(block_ids):
            self.order.add(leaf)
        for component in self.components:
            component.unlocked(block_ids)

    # -- evict --------------------------------------------------------------------------------

    def evict(
        self, num_blocks: int, wanted: Collection[Node] = (), num_ahead: int = 0
    ) -> list[int]:
        """Evict `num_blocks` that are not locked, or as many as there are, in this order:

        1. spare blocks of window groups (`components/windows.py`), of `wanted` nodes too;
        2. the last blocks of leaves with a tail (`eviction_order.py`), least recently used first;
        3. with recurrent groups states, in their own order (`components/state_order.py`), each with
           the end of a leaf that is of no use without it;
        4. leaves from their end, in the order of the policy;
        5. blocks before locked ones. Costs a scan of all blocks.

        In 2 to 4, nodes in `wanted` come after all others. In 4, up to `num_ahead` blocks more of a
        leaf go that is not wanted: they would be next, and one by one costs more.

        Blocks before locked ones are of two kinds. Window blocks that the end of a locked node
        needs are evicted alone. Full-attention blocks of an ended request are left if a running one
        has the same tokens in blocks of its own, and only what continues them is in the tree. They
        are evicted with everything that continues them, locked or not.

        Returns every block evicted, in case 5 possibly more than `num_blocks`. With several groups
        there may be more in any case, because the blocks at the end of a leaf go together, and with
        recurrent groups all after the last state that is left.
        """
        self.evictions.begin("evicted", self.clock())
        evicted: list[int] = []
        num_left = min(num_blocks, self.num_evictable_blocks)
        for component in self.components if num_left > 0 else ():
            spare = component.evict_spare(num_left)
            evicted += spare
            num_left -= len(spare)
        while num_left > 0:
            num_before = self.num_evictable_blocks
            if self.states is not None and (cut := self._evict_state(self.states, wanted)):
                evicted += cut
                num_left -= num_before - self.num_evictable_blocks  # some may be in use
                continue
            leaf = self.order.pop(wanted)
            if leaf is not None:
                is_partial = leaf.end % self.block_size != 0
                num_to_cut = num_left + num_ahead
                num_ends = 1 if is_partial else -(-num_to_cut // self._num_blocks_per_end)
                evicted += self._evict_end(leaf, num_ends)
                self.kept.settle()
                num_left -= num_before - self.num_evictable_blocks  # of windows, some are in use
            elif wanted:
                wanted, num_ahead = (), 0  # only wanted leaves are left
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
            # First those that can be evicted alone: they are of no group of full attention.
            unlocked.sort(key=lambda block_id: not any(block_id in one for one in self.components))
        for block_id in unlocked:
            if num_blocks <= 0:
                break
            num_before = self.num_evictable_blocks
            evicted += self._evict_block(block_id)
            num_blocks -= num_before - self.num_evictable_blocks

    def expire(self, unused_since: float) -> list[int]:
        """Evict what is not locked and has not been used since `unused_since`, on the tree's clock.

        The first call starts the bookkeeping that later ones need: O(nodes). Later calls cost
        O(log n) per leaf evicted, and O(1) if there is none.
        """
        if not self.order.may_expire:
            self.order.expire_from(filter(self.blocks.is_evictable, self.nodes()))
        self.evictions.begin("expired", self.clock())
        evicted: list[int] = []
        while (leaf := self.order.pop_unused_since(unused_since)) is not None:
            evicted += self._evict_end(leaf, len(leaf.block_ids))
        return evicted

    def evict_block(self, block_id: int) -> list[int]:
        """Evict `block_id`, whose contents are wrong, and all that continues it, locked or not.
        With full attention, evicting a block of a window group evicts nothing else. Evicting a
        block of a recurrent group evicts the whole state that it is part of.

        Returns every block evicted; none if `block_id` is not in the tree.
        """
        self.evictions.begin(None)
        if self.blocks.has_full_attention or self.windows is None or block_id not in self.windows:
            return self._evict_block(block_id)
        begin = self.windows.begin_of(block_id) // self.block_size * self.block_size
        return self._evict_from(self.blocks.owners[block_id], begin)

    def _evict_block(self, block_id: int) -> list[int]:
        node = self.blocks.owners.get(block_id)
        if node is None:
            return []
        for component in self.components:
            if block_id in component:
                return component.drop(block_id)
        number = node.start // self.block_size + node.block_ids.index(block_id)
        return self._evict_from(node, number * self.block_size)

    def _evict_from(self, node: Node, begin: int) -> list[int]:
        """Evict what `node` and all below it have after block-aligned `begin`, locked or not."""
        evicted: list[int] = []
        for child in node.children.values():
            self._remove_subtree(child, evicted)
        node.children = {}
        return evicted + self._cut(node, begin)

    def _evict_end(self, leaf: Node, num_blocks: int) -> list[int]:
        """Evict up to `num_blocks` unlocked blocks of full attention from the end of `leaf`, with
        the other groups' blocks of the same tokens; more if no state is left at the end then."""
        num_kept = len(leaf.block_ids)
        min_kept = max(0, num_kept - num_blocks)
        if self.states is not None:
            min_kept = min(min_kept, self.states.num_blocks_to_last_kept_state(leaf))
        locking = self.blocks.locking(leaf)
        while num_kept > min_kept and locking[num_kept - 1] not in self.blocks.locked:
            num_kept -= 1
        if not self.blocks.has_full_attention:
            while num_kept and locking[num_kept - 1] == HOLE:
                num_kept -= 1  # nothing can read these tokens any more
        if num_kept == 0 and self.states is not None:
            self._leave_shared_block(leaf)
        return self._cut(leaf, (leaf.start // self.block_size + num_kept) * self.block_size)

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
            for component in self.components:
                self.shortened += component.move_first(leaf, parent)
