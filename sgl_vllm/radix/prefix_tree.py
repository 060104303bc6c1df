"""The nodes of the radix tree, and which blocks each has: inserting and removing.

Owns the shape of the tree, and that nodes, blocks, components and the memory of evictions agree.
Does not own what is evicted, nor what a request can read (`tree.py`). Pure: no vLLM, no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.components.component import Component, Given, States
from sgl_vllm.radix.components.states import RecurrentStates
from sgl_vllm.radix.components.windows import WindowGroup, Windows
from sgl_vllm.radix.evicted_prefixes import EvictedPrefixes
from sgl_vllm.radix.eviction_order import EvictionOrder
from sgl_vllm.radix.eviction_policies import EvictionPolicy, lru
from sgl_vllm.radix.kept import KeptPrefixes
from sgl_vllm.radix.node import HOLE, InsertResult, Namespace, Node, descend, subtree
from sgl_vllm.radix.prompt_logprobs import PromptLogprobs
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.radix.watchers import Watchers


class PrefixTree:
    """Token-granular index of cached blocks. Inserting costs one dictionary lookup and one `memcmp`
    per node on the path: linear in tokens, at memory bandwidth.

    Invariant: `check_tree` in `invariants.py`.

    Args:
        block_size: tokens per block of full attention.
        policy: which leaf is evicted first.
        clock: seconds, monotonic.
        window_groups: the groups of layers that read a window.
        num_recurrent_groups: how many groups of recurrent layers there are.
        max_evicted_bytes: host memory for remembering what was evicted, about; 0 for none.
        has_full_attention: if not, all layers read a window, the first group of them the longest.
            Nodes then have a `HOLE` in place of each block of full attention, and `block_size` is
            that of the first group.

    Attributes:
        num_groups: groups of KV caches, full attention included.
        kept: the prefixes that clients ask to keep.
        components: the other groups: `windows` and `states`, None if the model has none.
        evictions: what was evicted.
        logprobs: log-probabilities of prompts whose requests asked for them.
        shortened: blocks of which the tree has lost the last tokens but not the first, with states
            only, since the caller last emptied the list.
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
        has_full_attention: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.clock = clock
        self.num_tokens = 0
        self.num_nodes = 0
        self.roots: dict[Namespace, Node] = {}
        self.blocks = BlockTable(block_size, has_full_attention)
        self.watchers = Watchers()
        self.num_groups = has_full_attention + len(window_groups) + num_recurrent_groups
        self._num_blocks_per_end = has_full_attention + num_recurrent_groups
        self._num_blocks_per_end += sum(block_size // one.block_size for one in window_groups)
        self.windows = Windows(window_groups, self.blocks, self.watchers) if window_groups else None
        self.states = (
            RecurrentStates(num_recurrent_groups, self.blocks, self.watchers, clock)
            if num_recurrent_groups
            else None
        )
        self.components: tuple[Component, ...] = tuple(
            one for one in (self.windows, self.states) if one is not None
        )
        has_tail = self.states.has_tail if self.states is not None else self.blocks.has_tail
        self.kept = KeptPrefixes(policy, self.blocks, clock)
        self.order = EvictionOrder(policy, self.blocks, has_tail, self.kept)
        self.shortened: list[int] = []
        self._namespaces: dict[Node, Namespace] = {}  # of roots
        self.evictions = EvictedPrefixes(max_evicted_bytes, self._namespaces)
        self.logprobs = PromptLogprobs()
        self._num_created = 0

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.blocks.owners

    def nodes(self) -> Iterator[Node]:
        """Every node that holds tokens, parents before children."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)

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
        known: Node | None = None,
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
                the tree already must be at the same place there. Without full attention, only
                their number matters.
            own_leaf: from the result of the caller's last insert of a prefix of `tokens`, if
                `can_extend` holds. Saves the way down from the root, and lets the leaf grow.
            windows: required if the tree has window groups: for each of them its blocks, numbered
                like `block_ids` but by its own block size; `HOLE` for those that the caller does
                not have. They also fill holes of cached tokens.
            states: states after prefixes of `tokens`, at positions in (0, n].
            known: without `own_leaf`, a node of the tree that ends with a prefix of `tokens`. Then
                `block_ids` begin at `known.end // block_size`. Not with windows or states.

        Raises:
            ValueError: too few blocks for the tokens, a position outside (0, n], or a block that is
                elsewhere in the tree. In the last case the tree may be changed in part.
        """
        size = self.block_size
        num_tokens = len(tokens) // TOKEN_BYTES
        if own_leaf is not None:
            known = own_leaf
        num_known = known.end if known is not None else 0
        first_block = num_known // size
        if (first_block + len(block_ids)) * size < num_tokens:
            num_blocks = first_block + len(block_ids)
            raise ValueError(f"{num_tokens} tokens need more than {num_blocks} blocks of {size}")
        if states and (min(states) <= 0 or max(states) > num_tokens):
            raise ValueError(f"states at {[*states]} are not all in (0, {num_tokens}]")
        if not num_tokens:
            return InsertResult(None, [], [])
        given = Given(windows, states or {}, num_known, own_leaf)
        taken: list[int] = []
        node, matched = self._locate(namespace, tokens, known)
        for component in self.components:
            taken += component.fill_holes(node, matched, given)
        if matched == num_tokens:
            for component in self.components:
                taken += component.after_insert(node, given)
            return InsertResult(own_leaf if node is own_leaf else None, taken, [])
        if matched < node.end:
            node = self._split(node, matched)
        begin, end = matched // size - first_block, -(-num_tokens // size) - first_block
        # A leaf's partial last block, its tail, holds the first tokens of the first of these. If
        # both are the same block, the tree has it already; if not, the longer copy replaces it.
        ids = list(block_ids[begin:end])
        if not self.blocks.has_full_attention:
            ids = [HOLE] * len(ids)
        tail = node.block_ids[-1] if matched % size and not node.children else None
        new_ids = ids[1:] if ids[0] == tail else ids
        if not self.blocks.owners.keys().isdisjoint(new_ids):
            raise ValueError(f"one of the blocks {ids} is already in the tree, at another place")
        new_tokens, continued = tokens[matched * TOKEN_BYTES :], node if tail is not None else None
        evicted: list[int] = []
        if node is own_leaf and not node.children and (tail is None or tail == ids[0]):
            ids = new_ids
            self._grow_leaf(node, new_tokens, ids)
        else:
            if tail is not None:
                evicted = self._replace_tail(node, ids[0])
            node = self._add_leaf(namespace, node, new_tokens, ids, priority)
        node.last_used = self.clock()
        taken += self.blocks.add(ids, node)
        self.num_tokens += num_tokens - matched
        for component in self.components:
            of_group, replaced = component.after_growth(node, matched, given, continued)
            taken += of_group
            evicted += replaced
            taken += component.after_insert(node, given)
        if self.blocks.is_evictable(node):  # the caller has given its last window back
            self.order.add(node)
        return InsertResult(node, taken, evicted)

    def _locate(self, namespace: Namespace, tokens: Tokens, known: Node | None) -> tuple[Node, int]:
        """The deepest node that `tokens` reach, which may be a new root, and how many of them it
        and its parents hold. `known` holds a prefix of them."""
        if known is not None:
            return descend(known, tokens, known.end)
        root = self.roots.get(namespace)
        if root is not None:
            return descend(root, tokens, 0)
        root = self.roots[namespace] = Node(None, 0, b"", [], 0)
        self._namespaces[root] = namespace
        return root, 0

    def _replace_tail(self, leaf: Node, block_id: int) -> list[int]:
        """`leaf` gives its partial last block up for `block_id`, which its first child will own.
        Returns the block if it is another one."""
        tail = leaf.block_ids.pop()
        self.blocks.remove([tail])
        return [tail] if tail != block_id else []

    def _grow_leaf(self, leaf: Node, tokens: Tokens, block_ids: Sequence[int]) -> None:
        self.watchers.notify(leaf, tokens[:TOKEN_BYTES])
        leaf.tokens += tokens
        leaf.end += len(tokens) // TOKEN_BYTES
        leaf.block_ids += block_ids

    def _add_leaf(
        self,
        namespace: Namespace,
        parent: Node,
        tokens: Tokens,
        block_ids: Sequence[int],
        priority: int,
    ) -> Node:
        leaf = Node(parent, parent.end, tokens, [*block_ids], priority)
        for component in self.components:
            component.add_node(leaf)
        first_token = tokens[:TOKEN_BYTES]
        parent.children[first_token] = leaf
        self._count(leaf)
        self.watchers.notify(namespace if parent.parent is None else parent, first_token)
        return leaf

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
        for component in self.components:
            component.split(node, upper)
        self.logprobs.split(node, upper)
        if node.kept_until:
            self.kept.split(node, upper)
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        self._count(upper)
        return upper

    def _count(self, node: Node) -> None:
        self.num_nodes += 1
        self._num_created += 1
        node.serial = self._num_created

    # -- remove -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove everything. O(nodes)."""
        self.evictions.begin("flushed", self.clock())
        nodes = list(self.nodes())
        for node in nodes:
            if not node.children:
                self.evictions.note(node, 0)
        for node in nodes:
            node.parent = None
            if node.context is not None:
                node.context.leaf = None
        self.watchers.notify_all()
        self.roots.clear()
        self._namespaces.clear()
        self.blocks.clear()
        for component in self.components:
            component.clear()
        self.logprobs.clear()
        self.order.clear()
        self.kept.clear()
        self.num_tokens = 0
        self.num_nodes = 0

    def _remove_subtree(self, top: Node, evicted: list[int]) -> None:
        for node in reversed([*subtree(top)]):  # the path to each stays until it is removed
            self.watchers.notify(node)
            self._remove(node, evicted)

    def _remove(self, node: Node, evicted: list[int]) -> None:
        """Remove `node` but for its entry in its parent's children."""
        evicted += self.blocks.remove(node.block_ids)
        self.evictions.note(node, node.start)
        if node.kept_until:
            self.kept.unmark(node)
        for component in self.components:
            evicted += component.cut(node, node.start)
        self.logprobs.cut(node, node.start)
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
            for component in self.components:
                component.leaving(node)
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
            evicted += self.blocks.remove(node.block_ids[num_kept:])
            del node.block_ids[num_kept:]
            for component in self.components:
                evicted += component.cut(node, end)
            self.logprobs.cut(node, end)
            self.evictions.note(node, end)
            self.num_tokens -= node.end - end
            node.tokens = node.tokens[: (end - node.start) * TOKEN_BYTES]
            node.end = end
        if self.blocks.is_evictable(node):
            self.order.add(node)
        return evicted

    def _end_of_own_blocks(self, node: Node) -> int:
        """How many tokens of the sequences through `node` are in its own blocks and those before
        them."""
        end = (node.start // self.block_size + len(node.block_ids)) * self.block_size
        return min(end, node.end)
