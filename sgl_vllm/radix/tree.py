"""A radix tree from token ids to the KV-cache blocks that hold their keys and values.

Owns: which computed tokens are cached, under which namespace, in which block, and which of the
blocks nobody uses goes first. Does not own the blocks: who uses one is for the caller to say
(`lock`, `unlock`). Pure: no vLLM, no torch.

The KV of token `i` of a sequence lies in the sequence's block number `i // block_size` at offset
`i % block_size`. A node owns the tokens `[start, end)` of every sequence through it:

    block number      0         1         2
                 |---------|---------|---------|
    root
     └─ A             [0 ......... 13)             owns block 0 (internal: the KV of [12, 13)
         ├─ B                     [13 .. 17)       owns blocks 1, 2        is in its children's
         └─ C                     [13 ..... 20)    owns blocks 1, 2        blocks 1)

Two sequences that part inside a block have a block each from there on, and both hold the shared
beginning of it. So an internal node that ends inside a block needs none for that part: each child
has it. **Every block belongs to exactly one node**; a leaf owns the blocks up to its end, an
internal node only those that it fills.

Tokens come packed (`pack`), four bytes each, so that whole edges are compared by one `memcmp`.

Idea: RadixAttention (Zheng et al., arXiv 2312.07104, section 3), here over paged blocks.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sgl_vllm.radix.eviction import EvictionPolicy, LeafQueue, lru

Namespace = Hashable
Tokens = bytes
"""Token ids, packed by `pack`."""

TOKEN_BYTES = 4
"""Of a packed token."""


def pack(token_ids: Sequence[int]) -> Tokens:
    """Token ids, each in [-2**31, 2**31), as native 32-bit integers. About 16 ns a token."""
    return array("i", token_ids).tobytes()


def unpack(tokens: Tokens) -> list[int]:
    """The inverse of `pack`."""
    return array("i", tokens).tolist()


class Node:
    """Tokens `[start, end)` below `parent`, and the blocks from number `start // block_size` on.

    `parent` is None for a root and for a node that is no longer in the tree.
    """

    __slots__ = (
        "block_ids",
        "children",
        "end",
        "last_used",
        "num_hits",
        "number",
        "parent",
        "priority",
        "start",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, start: int, tokens: Tokens, block_ids: list[int], priority: int
    ) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // TOKEN_BYTES
        self.tokens = tokens
        self.block_ids = block_ids
        self.children: dict[Tokens, Node] = {}  # by their first token
        self.number = 0  # tells nodes apart on pictures
        self.num_hits = 0
        self.last_used = 0.0  # seconds, on the tree's clock
        self.priority = priority  # the most important (smallest) of those who used it


class Match(NamedTuple):
    """The longest cached prefix of some tokens, and the deepest node that holds some of it."""

    num_tokens: int
    node: Node | None


class Inserted(NamedTuple):
    """What an insert changed.

    Attributes:
        own: the leaf that holds the end of the sequence, if this insert or one of the same caller
            made it: the next insert of the same, longer sequence may start from it.
        taken: the blocks that the tree owns from now on.
        forgotten: those that it does not own any more.
    """

    own: Node | None
    taken: list[int]
    forgotten: list[int]


NO_MATCH = Match(0, None)


class RadixTree:
    """Token-granular prefix cache index.

    Matching and inserting cost one dictionary step and one `memcmp` per node on the path: linear
    in tokens, with memory bandwidth as the constant. Evicting costs O(log n) per leaf. `version`
    changes whenever a match could come out differently.

    Args:
        block_size: tokens per block.
        policy: which of the leaves nobody uses goes first.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        block_size: int,
        policy: EvictionPolicy = lru,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.version = 0
        self.num_tokens = 0
        self.num_nodes = 0  # nodes that hold tokens: roots do not count
        self._num_made = 0
        self._clock = clock
        self._roots: dict[Namespace, Node] = {}
        self._namespaces: dict[Node, Namespace] = {}  # the way back
        self._owners: dict[int, Node] = {}
        self._locked: set[int] = set()  # a subset of _owners
        self._leaves = LeafQueue(policy, self._is_evictable)
        self._tails = LeafQueue(lru, self._has_evictable_tail)
        self._oldest = LeafQueue(lru, self._is_evictable)
        self._may_expire = False
        self._spared: list[tuple[LeafQueue, Node]] = []
        self._spared_for: Collection[Node] = ()
        self._watchers: dict[Node | Namespace, dict[Tokens, set[Hashable]]] = {}
        self._watched: dict[Hashable, tuple[Node | Namespace, Tokens]] = {}
        self._changed: dict[Hashable, None] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that the tree owns: protected and evictable ones."""
        return len(self._owners)

    @property
    def num_protected_blocks(self) -> int:
        """Of these, the locked ones."""
        return len(self._locked)

    @property
    def num_evictable_blocks(self) -> int:
        """Of these, the ones that nobody has locked: `evict` can get at every one of them."""
        return len(self._owners) - len(self._locked)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._owners

    def nodes(self) -> Iterator[Node]:
        """Every node that holds tokens, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- look up ------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens`. Changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return NO_MATCH
        node, num_tokens = self._descend(root, tokens, 0)
        return Match(num_tokens, node) if num_tokens else NO_MATCH

    def block_ids(self, match: Match, num_tokens: int) -> list[int]:
        """The blocks that hold the first `num_tokens` of a match that has just been made.

        Block `j` of them holds tokens `[j * block_size, min((j + 1) * block_size, num_tokens))`,
        so there are ceil(num_tokens / block_size); the last may hold more than asked for.
        """
        size = self.block_size
        path = []
        node = match.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        block_ids: list[int] = []
        for node in reversed(path):
            block_ids += node.block_ids
        num_blocks = -(-num_tokens // size)
        if len(block_ids) < num_blocks:  # ends in the part that an internal node leaves to children
            block_ids.append(self._first_block_below(path[0]))
        del block_ids[num_blocks:]
        return block_ids

    def hit(self, match: Match, priority: int = 0) -> None:
        """Say that a request of `priority` reads what it matched. A node that is read in part is
        cut in two, so that hits and ages are those of what was read."""
        node = match.node
        if node is None or node.parent is None:
            return
        if node.start < match.num_tokens < node.end:
            node = self._split(node, match.num_tokens)
        self._use(node, priority, 1)

    def use(self, node: Node | None, priority: int = 0) -> None:
        """Say that a request of `priority` has just used what `node` and all above it hold."""
        self._use(node, priority, 0)

    def _use(self, node: Node | None, priority: int, num_hits: int) -> None:
        now = self._clock()
        while node is not None:
            node.num_hits += num_hits
            node.last_used = now
            if priority < node.priority:
                node.priority = priority
            node = node.parent

    def _descend(self, node: Node, tokens: Tokens, matched: int) -> tuple[Node, int]:
        """From `node`, which holds the first `matched` tokens, to the deepest node reached; and
        how many tokens it and its parents hold."""
        position, end = matched * TOKEN_BYTES, len(tokens)
        while position < end:
            child = node.children.get(tokens[position : position + TOKEN_BYTES])
            if child is None:
                break
            node = child
            if not tokens.startswith(node.tokens, position):
                position += TOKEN_BYTES * common_prefix_length(node.tokens, tokens, position)
                break
            position += len(node.tokens)
        return node, position // TOKEN_BYTES

    # -- watch --------------------------------------------------------------------------------

    def watch(self, who: Hashable, namespace: Namespace, tokens: Tokens, match: Match) -> None:
        """Have `take_changed` name `who` once, when `tokens` may match other than `match`, which
        has just been found. Then, and if something else is to be watched, `watch` again.

        Every insert tells those only who wait for the token that it begins with, at the place where
        it leaves the tree: O(1), and O(1) for each who is told.
        """
        self.unwatch(who)
        place = match.node if match.node is not None else namespace
        position = match.num_tokens * TOKEN_BYTES
        next_token = tokens[position : position + TOKEN_BYTES]
        self._watched[who] = place, next_token
        self._watchers.setdefault(place, {}).setdefault(next_token, set()).add(who)

    def unwatch(self, who: Hashable) -> None:
        """Forget `who`, watching or not."""
        self._changed.pop(who, None)
        watched = self._watched.pop(who, None)
        if watched is None:
            return
        place, next_token = watched
        at_place = self._watchers[place]
        at_place[next_token].discard(who)
        if not at_place[next_token]:
            del at_place[next_token]
            if not at_place:
                del self._watchers[place]

    def take_changed(self) -> list[Hashable]:
        """Who has to match again. They watch nothing any more."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _tell(self, place: Node | Namespace, next_token: Tokens | None = None) -> None:
        """Those who watch a place, or only those there who go on with `next_token`."""
        at_place = self._watchers.get(place)
        if at_place is None:
            return
        tokens = list(at_place) if next_token is None else [next_token]
        for token in tokens:
            for who in at_place.pop(token, ()):
                del self._watched[who]
                self._changed[who] = None
        if not at_place:
            del self._watchers[place]

    def _first_block_below(self, node: Node) -> int:
        """A block that holds the part of internal `node` after its last full block."""
        while True:
            node = next(iter(node.children.values()))
            if node.block_ids:
                return node.block_ids[0]

    # -- insert -------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_ids: Sequence[int],
        own: Node | None = None,
        priority: int = 0,
    ) -> Inserted:
        """Record that `block_ids` hold the KV of `tokens`, from the first token on.

        The caller uses these blocks: those that the tree takes are locked. What is already there
        stays and the caller's copy of it is not taken; a shorter copy of a block that `tokens`
        continue is forgotten.

        Args:
            tokens: n of them, the whole sequence.
            block_ids: the blocks from number 0 on, with `own` from `own.end // block_size` on, up
                to number ceil(n / block_size) - 1 or more. None may be in the tree other than at
                its own place.
            own: what the caller's last insert of a beginning of `tokens` returned, if it `leads_to`
                them. Saves the way down from the root, and lets the leaf grow in place.

        Raises:
            ValueError: fewer blocks than the tokens need, or one is elsewhere in the tree.
        """
        size = self.block_size
        num_tokens = len(tokens) // TOKEN_BYTES
        first_block = own.end // size if own is not None else 0
        if (first_block + len(block_ids)) * size < num_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit {len(block_ids)} blocks of {size}")
        if own is not None:
            node, matched = self._descend(own, tokens, own.end)
        else:
            root = self._roots.get(namespace)
            if root is None:
                if not num_tokens:
                    return Inserted(None, [], [])
                root = self._roots[namespace] = Node(None, 0, b"", [], 0)
                self._namespaces[root] = namespace
            node, matched = self._descend(root, tokens, 0)
        if matched == num_tokens:
            return Inserted(own if node is own else None, [], [])
        if matched < node.end:
            node = self._split(node, matched)
        taken = list(
            block_ids[matched // size - first_block : -(-num_tokens // size) - first_block]
        )
        # The leaf's partial last block and the first of these begin alike: one of them is enough.
        has_tail = matched % size != 0 and not node.children
        tail = node.block_ids[-1] if has_tail else None
        elsewhere = taken[1:] if taken[0] == tail else taken
        if not self._owners.keys().isdisjoint(elsewhere):
            raise ValueError(f"one of the blocks {taken} is already in the tree, at another place")
        forgotten: list[int] = []
        if node is own and not node.children and (tail is None or tail == taken[0]):
            taken = elsewhere
            self._tell(node, tokens[matched * TOKEN_BYTES : (matched + 1) * TOKEN_BYTES])
            node.tokens += tokens[matched * TOKEN_BYTES :]
            node.end = num_tokens
            node.block_ids += taken
        else:
            if tail is not None:
                node.block_ids.pop()
                self._forget_blocks([tail])
                if tail != taken[0]:
                    forgotten.append(tail)
            parent, node = (
                node,
                Node(node, matched, tokens[matched * TOKEN_BYTES :], taken[:], priority),
            )
            first_token = node.tokens[:TOKEN_BYTES]
            parent.children[first_token] = node
            self._count(node)
            self._tell(namespace if parent.parent is None else parent, first_token)
        node.last_used = self._clock()
        self._owners.update(dict.fromkeys(taken, node))
        self._locked.update(taken)
        self.num_tokens += num_tokens - matched
        self.version += 1
        return Inserted(node, taken, forgotten)

    def leads_to(self, own: Node | None, num_tokens: int) -> bool:
        """Whether an insert of `num_tokens` may start from `own`: it is still in the tree, and not
        past them."""
        return own is not None and own.parent is not None and own.end <= num_tokens

    def _split(self, node: Node, position: int) -> Node:
        """Cut `node` at sequence `position` and return the new upper half."""
        parent = node.parent
        assert parent is not None and node.start < position < node.end
        self._tell(node)
        num_upper_blocks = position // self.block_size - node.start // self.block_size
        cut = (position - node.start) * TOKEN_BYTES
        upper = Node(
            parent, node.start, node.tokens[:cut], node.block_ids[:num_upper_blocks], node.priority
        )
        upper.num_hits, upper.last_used = node.num_hits, node.last_used
        self._owners.update(dict.fromkeys(upper.block_ids, upper))
        parent.children[upper.tokens[:TOKEN_BYTES]] = upper
        node.parent, node.start = upper, position
        node.tokens = node.tokens[cut:]
        del node.block_ids[:num_upper_blocks]
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        self._count(upper)
        return upper

    def _count(self, node: Node) -> None:
        self.num_nodes += 1
        self._num_made += 1
        node.number = self._num_made

    # -- lock ---------------------------------------------------------------------------------

    def lock(self, block_ids: Iterable[int]) -> None:
        """Somebody reads these blocks: evict none of them, nor what they continue. Ids that are
        not in the tree are passed over."""
        self._locked.update(filter(self._owners.__contains__, block_ids))

    def unlock(self, block_ids: Sequence[int]) -> None:
        """Nobody uses these blocks any more. Ids that are not in the tree are passed over."""
        self._locked.difference_update(block_ids)
        for node in set(map(self._owners.get, block_ids)):
            if node is not None and self._is_evictable(node):
                self._offer(node)

    def _is_evictable(self, node: Node) -> bool:
        """Whether `node` is a leaf of the tree whose last block nobody uses."""
        return (
            node.parent is not None and not node.children and node.block_ids[-1] not in self._locked
        )

    def _has_evictable_tail(self, node: Node) -> bool:
        """Whether it ends in a block that it fills in part only."""
        return node.end % self.block_size != 0 and self._is_evictable(node)

    def _offer(self, node: Node) -> None:
        self._leaves.push(node)
        if node.end % self.block_size:
            self._tails.push(node)
        if self._may_expire:
            self._oldest.push(node)

    # -- evict --------------------------------------------------------------------------------

    def evict(self, num_blocks: int, wanted: Collection[Node] = ()) -> list[int]:
        """Forget `num_blocks` that nobody uses, or as many as there are.

        Partial last blocks of leaves go first, the longest unused before the others: they are what
        this cache keeps and one of whole blocks would not, and may not cost what both would keep.
        Then leaves go, from their end, in the policy's order. Nodes in `wanted` go after all
        others; they stay set aside as long as the same collection is given again.

        Should only blocks be left that stand above locked ones (two requests computed the same
        tokens, and the one whose copy is in the tree has gone), these go with all that continues
        them: a scan of all blocks, for 64 of them at least.

        Returns every block that is forgotten, so more than asked for in that last case.
        """
        forgotten: list[int] = []
        num_left = min(num_blocks, self.num_evictable_blocks)
        if wanted is not self._spared_for:
            self._put_back_spared()
            self._spared_for = wanted
        while num_left > 0:
            num_left -= self._evict_leaves(num_left, wanted, forgotten)
            if not self._spared:
                break
            self._put_back_spared()
            wanted = ()
        if num_left > 0:
            # To scan is dear: take some more, so that it is not done again for each.
            num_left = max(num_left, 64)
            for block_id in [i for i in self._owners if i not in self._locked]:
                if num_left <= 0:
                    break
                num_before = self.num_evictable_blocks
                forgotten += self.drop_block(block_id)
                num_left -= num_before - self.num_evictable_blocks
        return forgotten

    def _evict_leaves(self, num_blocks: int, wanted: Collection[Node], forgotten: list[int]) -> int:
        """Forget up to `num_blocks` from the ends of leaves, setting aside who is wanted."""
        num_left = num_blocks
        for queue, is_tails in ((self._tails, True), (self._leaves, False)):
            while num_left > 0 and (node := queue.pop()) is not None:
                if node in wanted:
                    self._spared.append((queue, node))
                    continue
                dropped = self._evict_end_of(node, 1 if is_tails else num_left)
                num_left -= len(dropped)
                forgotten += dropped
        return num_blocks - num_left

    def _put_back_spared(self) -> None:
        for queue, node in self._spared:
            queue.push(node)
        self._spared = []

    def expire(self, unused_since: float) -> list[int]:
        """Forget what nobody uses and nobody has used since `unused_since`, on the tree's clock.

        The first call starts the book-keeping that later ones need: O(log n) per leaf that goes,
        O(1) if none does.
        """
        if not self._may_expire:
            self._may_expire = True
            for node in self.nodes():
                if self._is_evictable(node):
                    self._oldest.push(node)
        forgotten: list[int] = []
        while (oldest := self._oldest.pop()) is not None:
            if oldest.last_used >= unused_since:
                self._oldest.push(oldest)
                break
            forgotten += self._evict_end_of(oldest, len(oldest.block_ids))
        return forgotten

    def _evict_end_of(self, leaf: Node, num_blocks: int) -> list[int]:
        """Forget up to `num_blocks` unlocked blocks from the end of `leaf`; offer what is then
        the leaf."""
        num_kept = len(leaf.block_ids)
        num_least = max(0, num_kept - num_blocks)
        while num_kept > num_least and leaf.block_ids[num_kept - 1] not in self._locked:
            num_kept -= 1
        forgotten, left = self._cut(
            leaf, (leaf.start // self.block_size + num_kept) * self.block_size
        )
        if left is not None and self._is_evictable(left):
            self._offer(left)
        self.version += 1
        return forgotten

    def drop_block(self, block_id: int) -> list[int]:
        """Forget `block_id` and everything that continues it, locked or not.

        Returns every block that is forgotten; none if it is not here.
        """
        node = self._owners.get(block_id)
        if node is None:
            return []
        self.version += 1
        forgotten: list[int] = []
        for child in node.children.values():
            self._forget_subtree(child, forgotten)
        node.children = {}
        number = node.start // self.block_size + node.block_ids.index(block_id)
        cut, left = self._cut(node, number * self.block_size)
        if left is not None and self._is_evictable(left):
            self._offer(left)
        return forgotten + cut

    def _forget_subtree(self, top: Node, forgotten: list[int]) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._tell(node)
            forgotten += node.block_ids
            self._forget_blocks(node.block_ids)
            self.num_tokens -= node.end - node.start
            self.num_nodes -= 1
            node.parent = None

    def _forget_blocks(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self._owners[block_id]
        self._locked.difference_update(block_ids)

    def _cut(self, node: Node, end: int) -> tuple[list[int], Node | None]:
        """Cut childless `node` back to block-aligned `end`; remove it, and parents whose last
        tokens only it held, where nothing is left.

        Returns the forgotten blocks, and the node that has become a leaf or is still one.
        """
        size = self.block_size
        forgotten: list[int] = []
        while True:
            parent = node.parent
            assert parent is not None
            self._tell(node)
            if end > node.start:
                num_kept_blocks = end // size - node.start // size
                dropped = node.block_ids[num_kept_blocks:]
                self._forget_blocks(dropped)
                del node.block_ids[num_kept_blocks:]
                self.num_tokens -= node.end - end
                node.tokens = node.tokens[: (end - node.start) * TOKEN_BYTES]
                node.end = end
                return forgotten + dropped, node
            forgotten += node.block_ids
            self._forget_blocks(node.block_ids)
            self.num_tokens -= node.end - node.start
            self.num_nodes -= 1
            node.parent = None
            del parent.children[node.tokens[:TOKEN_BYTES]]
            if parent.parent is None:
                if not parent.children:
                    del self._roots[self._namespaces.pop(parent)]
                return forgotten, None
            if parent.children:
                return forgotten, None
            if parent.end % size == 0:
                return forgotten, parent
            node, end = parent, parent.end // size * size

    def clear(self) -> None:
        """Forget everything."""
        for node in self.nodes():
            node.parent = None
        for place in list(self._watchers):
            self._tell(place)
        self._roots.clear()
        self._namespaces.clear()
        self._spared.clear()
        self._owners.clear()
        self._locked.clear()
        self._leaves.clear()
        self._tails.clear()
        self._oldest.clear()
        self.num_tokens = 0
        self.num_nodes = 0
        self.version += 1

    # -- views --------------------------------------------------------------------------------

    def describe(
        self,
        max_nodes: int = 1000,
        *,
        is_isolated: Callable[[Namespace], bool] = lambda namespace: False,
        pinned: Collection[int] = (),
        wanted: Collection[Node] = (),
        max_tokens: int = 0,
    ) -> dict[str, Any]:
        """The tree's shape for people and pages: sizes, hits and ages, no names of namespaces.

        `nodes` lists at most `max_nodes`, those near the roots first, parents before children;
        `id` stays with a node, `parent` is an index into the list, None for a node that begins a
        sequence, and `namespace` numbers what shares nothing. Of isolated namespaces only one
        total is given.

        Args:
            pinned: ids of the blocks that are pinned.
            wanted: nodes that waiting requests match.
            max_tokens: give so many of every node's token ids too. They are somebody's prompt.
        """
        now = self._clock()
        nodes: list[dict[str, Any]] = []
        isolated = {"namespaces": 0, "num_tokens": 0, "num_nodes": 0, "num_blocks": 0}
        waiting: deque[tuple[Node, int | None, int]] = deque()
        number = 0
        for namespace, root in self._roots.items():
            if is_isolated(namespace):
                isolated["namespaces"] += 1
                for node in _subtree(root):
                    isolated["num_tokens"] += node.end - node.start
                    isolated["num_blocks"] += len(node.block_ids)
                    isolated["num_nodes"] += node.parent is not None
            else:
                waiting.extend((child, None, number) for child in root.children.values())
                number += 1
        while waiting and len(nodes) < max_nodes:
            node, parent, number = waiting.popleft()
            waiting.extend((child, len(nodes), number) for child in node.children.values())
            nodes.append(
                {
                    "id": node.number,
                    "parent": parent,
                    "namespace": number,
                    "num_tokens": node.end - node.start,
                    "num_blocks": len(node.block_ids),
                    "num_locked_blocks": sum(i in self._locked for i in node.block_ids),
                    "num_pinned_blocks": sum(i in pinned for i in node.block_ids),
                    "hits": node.num_hits,
                    "age_s": round(now - node.last_used, 3),
                    "wanted": node in wanted,
                    **(
                        {"tokens": unpack(node.tokens[: max_tokens * TOKEN_BYTES])}
                        if max_tokens
                        else {}
                    ),
                }
            )
        return {
            "block_size": self.block_size,
            "num_tokens": self.num_tokens,
            "num_nodes": self.num_nodes,
            "num_blocks": self.num_blocks,
            "num_protected_blocks": self.num_protected_blocks,
            "num_evictable_blocks": self.num_evictable_blocks,
            "isolated": isolated,
            "nodes_left_out": self.num_nodes - isolated["num_nodes"] - len(nodes),
            "nodes": nodes,
        }

    def check_invariants(self) -> None:
        """Raise AssertionError if the tree contradicts itself. Walks everything: for tests."""
        size = self.block_size
        owners: dict[int, Node] = {}
        num_tokens = num_nodes = 0
        assert self._namespaces == {root: name for name, root in self._roots.items()}
        spared = {node for _, node in self._spared}
        for root in self._roots.values():
            assert root.parent is None and not root.tokens and root.children
        for node in self.nodes():
            parent = node.parent
            assert (
                parent is not None and len(node.tokens) == (node.end - node.start) * TOKEN_BYTES > 0
            )
            assert parent.children[node.tokens[:TOKEN_BYTES]] is node and node.start == parent.end
            last = node.end // size if node.children else -(-node.end // size)
            assert len(node.block_ids) == max(0, last - node.start // size)
            for block_id in node.block_ids:
                assert block_id not in owners, f"block {block_id} belongs to two nodes"
                owners[block_id] = node
            if self._is_evictable(node):
                assert node in self._leaves or node in spared, "an evictable leaf is nowhere"
                assert not self._may_expire or node in self._oldest
            num_tokens += node.end - node.start
            num_nodes += 1
        assert owners == self._owners
        assert self._locked <= owners.keys()
        assert (num_tokens, num_nodes) == (self.num_tokens, self.num_nodes)


def _subtree(top: Node) -> Iterator[Node]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def common_prefix_length(edge: Tokens, tokens: Tokens, offset: int = 0) -> int:
    """How many leading tokens of `edge` are those of `tokens` from byte `offset` on."""
    length = min(len(edge), len(tokens) - offset) // TOKEN_BYTES
    different = np.frombuffer(edge, np.int32, length) != np.frombuffer(
        tokens, np.int32, length, offset
    )
    first = int(different.argmax())
    return first if different[first] else length
