"""What the tree has evicted, remembered so that a later miss can be explained.

Owns the evicted runs of tokens: where each continues what is cached, why it was evicted and when.
Does not own what is cached (`tree.py`), nor what a miss is put down to (`misses.py`). Pure: no
vLLM, no torch.

The runs continue the tree. Each hangs at the position of a node, or of another run, where its
tokens went on, in the field `evicted_runs` of that node
or run:

    cached        |------- A -------|            evicted at its end: [40, 64)
                          |                      and inside it: [32, 48), of another continuation
                  0      32        40

When a leaf loses its end, the lost tokens are a run at its new end. When a node goes, its tokens
are a run of its parent, and take along what hung at the node. When tokens are cached again, the
tree has them, so they leave the runs. So a lookup goes on from where its match ends, with one
dictionary lookup and one `memcmp` per run, and what it finds is exact.

Remembering costs O(1) for each leaf that is evicted or shortened. Nodes without evicted runs cost
one comparison where they change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sgl_vllm.radix.node import RUN_BYTES, EvictedRun, Namespace, Node, Reason, Runs
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, common_prefix_length

MAX_MERGED_TOKENS = 4096
"""A run that has as many tokens is not extended any more: each time copies them."""


class EvictedPart(NamedTuple):
    """The tokens of a sequence up to `end`, from where the part before ends, were evicted."""

    end: int
    reason: Reason
    evicted_at: float


class EvictionMemory:
    """The evicted runs of one tree.

    Args:
        max_bytes: about how much host memory they may take. The oldest are forgotten first. With 0,
            nothing is remembered.
        namespaces: of the tree's roots.

    Invariant: `check` below. A run that hangs at a forgotten one cannot be found, but counts until
    it is forgotten too.
    """

    def __init__(self, max_bytes: int, namespaces: Mapping[Node, Namespace]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._namespaces = namespaces
        self._at_roots: dict[Namespace, Runs] = {}
        """What hangs at position 0, also of namespaces of which nothing is cached."""
        self._max_roots = 64
        self._order: deque[EvictedRun] = deque()
        """All runs, the oldest first, and some without tokens, which are cached again."""
        self._num_runs = 0
        self._reason: Reason | None = None
        self._now = 0.0

    def __len__(self) -> int:
        """How many runs are remembered."""
        return self._num_runs

    def clear(self) -> None:
        """Forget all runs. The tree must be empty."""
        self._order.clear()
        self._at_roots.clear()
        self.num_bytes = self._num_runs = 0

    # -- what leaves the tree -----------------------------------------------------------------

    def begin(self, reason: Reason | None, now: float = 0.0) -> None:
        """What leaves the tree from now on does so for this reason. With None it is forgotten at
        once: its KV was wrong or never computed."""
        self._reason = reason if self.max_bytes else None
        self._now = now

    def node_left(self, node: Node) -> None:
        """`node` is about to leave the tree, after its parent or with it."""
        if self._reason is None:
            return
        if node.children:  # they leave next
            if node.evicted_runs is None:
                node.evicted_runs = {}
            self._add(node.parent, node.start, node.tokens, node.evicted_runs)
        else:
            self._add_or_extend(node.parent, node.start, node.tokens, node.evicted_runs)

    def end_left(self, node: Node, end: int) -> None:
        """Childless `node` is about to lose its tokens from `end` on."""
        if self._reason is None:
            _cut_after(node, end)
            return
        lost = node.tokens[(end - node.start) * TOKEN_BYTES :]
        self._add_or_extend(node, end, lost, _cut_after(node, end))

    def _add_or_extend(
        self, node: Node | None, position: int, tokens: Tokens, evicted_runs: Runs | None
    ) -> None:
        """As `_add`, but if `evicted_runs` are the one run that was cut off before, for the same
        reason, the tokens become its first: a leaf often leaves the tree block by block."""
        if node is not None and evicted_runs is not None and len(evicted_runs) == 1:
            (run,) = evicted_runs.values()
            if (
                run.key[0] == position + len(tokens) // TOKEN_BYTES
                and run.reason == self._reason
                and len(run.tokens) < MAX_MERGED_TOKENS * TOKEN_BYTES
            ):
                run.tokens = tokens + run.tokens
                run.evicted_at = self._now
                run.key = position, tokens[:TOKEN_BYTES]
                run.holder = self._runs_of(node)
                run.holder[run.key] = run
                self.num_bytes += len(tokens)
                self._forget_oldest()
                return
        self._add(node, position, tokens, evicted_runs)

    def _add(
        self, node: Node | None, position: int, tokens: Tokens, evicted_runs: Runs | None
    ) -> None:
        if self._reason is None or node is None:
            return
        runs = self._runs_of(node)
        key = position, tokens[:TOKEN_BYTES]
        runs[key] = run = EvictedRun(tokens, self._reason, self._now, evicted_runs, runs, key)
        self._order.append(run)
        self._num_runs += 1
        self.num_bytes += RUN_BYTES + len(tokens)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self.num_bytes > self.max_bytes:
            oldest = self._order.popleft()
            if oldest.tokens:
                del oldest.holder[oldest.key]
                self.num_bytes -= oldest.num_bytes
                self._num_runs -= 1

    def _runs_of(self, node: Node) -> Runs:
        """What hangs at `node`, to be changed."""
        if not node.evicted_runs and node in self._namespaces:
            return self._runs_of_root(node)
        if node.evicted_runs is None:
            node.evicted_runs = {}
        return node.evicted_runs

    def _runs_of_root(self, root: Node) -> Runs:
        namespace = self._namespaces[root]
        if namespace not in self._at_roots:
            if len(self._at_roots) >= self._max_roots:
                self._at_roots = {name: runs for name, runs in self._at_roots.items() if runs}
                self._max_roots = 64 + 2 * len(self._at_roots)
            self._at_roots[namespace] = {}
        root.evicted_runs = self._at_roots[namespace]
        return root.evicted_runs

    # -- what changes in the tree ---------------------------------------------------------------

    def root_added(self, root: Node) -> None:
        root.evicted_runs = self._at_roots.get(self._namespaces[root])

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has got the first tokens of `node`."""
        below = _cut_after(node, upper.end)
        upper.evicted_runs, node.evicted_runs = node.evicted_runs, below

    def cached_again(self, runs: Runs, node: Node, position: int) -> None:
        """`node` has got tokens from `position` on, where `runs` hang. What it has of them is
        forgotten, and what hung at that now hangs at the node."""
        offset = (position - node.start) * TOKEN_BYTES
        next_runs: Runs | None = runs
        while next_runs:
            first = node.tokens[offset : offset + TOKEN_BYTES]
            run = next_runs.pop((position, first), None)
            if run is None:
                break
            num_same = common_prefix_length(run.tokens, node.tokens, offset)
            position += num_same
            offset += num_same * TOKEN_BYTES
            below = _cut_after(run, position)
            if run.evicted_runs:
                node.evicted_runs = _moved(run.evicted_runs, node.evicted_runs)
            self.num_bytes -= run.num_bytes
            run.tokens = run.tokens[num_same * TOKEN_BYTES :]
            if run.tokens:
                if node.evicted_runs is None:
                    node.evicted_runs = {}
                run.evicted_runs, run.holder = below, node.evicted_runs
                run.key = position, run.tokens[:TOKEN_BYTES]
                node.evicted_runs[run.key] = run
                self.num_bytes += run.num_bytes
            else:
                self._num_runs -= 1
            next_runs = node.evicted_runs
        if len(self._order) > 2 * self._num_runs + 64:
            self._order = deque(run for run in self._order if run.tokens)

    # -- look up ------------------------------------------------------------------------------

    def at_root(self, namespace: Namespace) -> Runs | None:
        """What hangs at the start of a namespace's sequences."""
        return self._at_roots.get(namespace)

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError if a run hangs where no lookup goes, or the tree has its tokens: for
        tests."""
        holders: list[Node | EvictedRun] = [*nodes]
        for runs in self._at_roots.values():
            holders += runs.values()
            assert all(run.holder is runs and run.key[0] == 0 for run in runs.values())
        for root, namespace in self._namespaces.items():
            assert (root.evicted_runs or {}) == (self._at_roots.get(namespace) or {})
            assert not {first for _, first in root.evicted_runs or ()} & root.children.keys()
        seen = set(holders)
        for holder in holders:
            start = holder.start if isinstance(holder, Node) else holder.key[0]
            for key, run in (holder.evicted_runs or {}).items():
                offset = (key[0] - start) * TOKEN_BYTES
                assert run.holder is holder.evicted_runs and run.key == key and run not in seen
                assert 0 < offset <= len(holder.tokens)
                assert key[1] == run.tokens[:TOKEN_BYTES]
                assert not holder.tokens.startswith(key[1], offset)
                if isinstance(holder, Node) and offset == len(holder.tokens):
                    assert key[1] not in holder.children
                seen.add(run)
                holders.append(run)
        runs_left = [run for run in self._order if run.tokens]
        assert len(runs_left) == self._num_runs
        assert self.num_bytes == sum(run.num_bytes for run in runs_left) <= self.max_bytes


def evicted_parts(runs: Runs | None, position: int, tokens: Tokens) -> Iterator[EvictedPart]:
    """The parts of `tokens` from `position` on, where `runs` hang, that were evicted."""
    while runs:
        offset = position * TOKEN_BYTES
        run = runs.get((position, tokens[offset : offset + TOKEN_BYTES]))
        if run is None:
            return
        position += common_prefix_length(run.tokens, tokens, offset)
        yield EvictedPart(position, run.reason, run.evicted_at)
        runs = run.evicted_runs


def _cut_after(holder: Node | EvictedRun, position: int) -> Runs | None:
    """Take the runs after `position` from `holder`. Returns them."""
    if not holder.evicted_runs:
        return None
    below: Runs = {key: run for key, run in holder.evicted_runs.items() if key[0] > position}
    for key, run in below.items():
        del holder.evicted_runs[key]
        run.holder = below
    return below or None


def _moved(runs: Runs, to: Runs | None) -> Runs:
    """All of `runs` in `to`, if there is one."""
    if to is None:
        return runs
    for run in runs.values():
        run.holder = to
    to |= runs
    return to
