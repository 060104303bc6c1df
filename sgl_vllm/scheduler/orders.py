"""The orders of admission: the keys by which waiting requests are sorted. Pure.

An order is a function in `ORDERS`. To add one, write the function and its entry: the option
`schedule_policy` and its docs take their choices from there.

Ideas: longest prefix first and depth first (arXiv 2312.07104, section 3); programs by the service
they have had (arXiv 2502.13965). Keeping together requests that share a prefix which is not cached
yet is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.node import Node
from sgl_vllm.scheduler.rows import Ints, Rows

Nodes = Callable[[], list[Node | None]]
"""The node that each row matches. A function, because most orders do not need it."""

Keys = list[NDArray[np.generic]]
"""Sort keys, each of shape (number of rows,), the most significant first. Smaller goes first; ties
go in order of arrival."""

Order = Callable[[Rows, Nodes], Keys]


def longest_prefix_match(rows: Rows, nodes: Nodes) -> Keys:
    """Longest cached prefix first; requests whose next tokens are the same stay together."""
    matched = _best_of_group(rows["fork_group"], rows["matched"], np.maximum)
    first = _best_of_group(rows["next_tokens_key"], rows["arrival"], np.minimum)
    of_group = _best_of_group(rows["fork_group"], np.minimum(first, rows["since"]), np.minimum)
    return [-matched, of_group, first]


def depth_first_by_weight(rows: Rows, nodes: Nodes) -> Keys:
    """Depth first over the tree, at every fork to the branch for which most requests wait."""
    places = _best_of_group(rows["fork_group"], depth_first_places(nodes()), np.minimum)
    return [places, *longest_prefix_match(rows, nodes)]


def least_attained_service(rows: Rows, nodes: Nodes) -> Keys:
    """Half-cached requests first, then requests that are not an agent's, then agents'.

    Within each group, the conversation with the fewest computed tokens goes first. Token counts are
    compared in powers of two; ties go by longest cached prefix.
    """
    rank = rows.is_cold * (1 + rows["is_agent"].astype(np.int64))
    served = np.frexp(rows["served"])[1].astype(np.int64)
    keys = (_best_of_group(rows["fork_group"], key, np.minimum) for key in (rank, served))
    return [*keys, *longest_prefix_match(rows, nodes)]


def first_come_first_served(rows: Rows, nodes: Nodes) -> Keys:
    """In order of arrival (FCFS). A fork group has the place of its first request."""
    return [rows["since"]]


def at_random(rows: Rows, nodes: Nodes) -> Keys:
    """In random order: for benchmarks."""
    mixed = rows["arrival"].astype(np.uint64)
    for _ in range(2):  # of MurmurHash3's last step, so that neighbors land far apart
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return [(mixed >> np.uint64(1)).astype(np.int64)]


ORDERS: Mapping[str, Order] = {
    "lpm": longest_prefix_match,
    "dfs-weight": depth_first_by_weight,
    "fcfs": first_come_first_served,
    "random": at_random,
}

CACHE_AWARE = frozenset({"lpm", "dfs-weight"})
"""The orders that gain nothing while everything that waits fits into the cache."""


def _best_of_group(groups: Ints, values: Ints, best: np.ufunc) -> Ints:
    """For each row the best value of its group, or its own value if its group is negative."""
    members = np.flatnonzero(groups >= 0)
    if len(members) < 2:
        return values
    members = members[np.argsort(groups[members])]
    groups = groups[members]
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    if len(starts) == len(members):
        return values
    bests = best.reduceat(values[members], starts)
    values = values.copy()
    values[members] = bests.repeat(np.diff(starts, append=len(members)))
    return values


def depth_first_places(nodes: list[Node | None]) -> Ints:
    """The place of each node in a depth-first walk of the tree, shape (number of nodes,).

    Among siblings, the one below which most of `nodes` are comes first. A node comes after all
    nodes below it. None comes last. Costs a few microseconds for each node and its ancestors.
    """
    weights: Counter[Node | None] = Counter(nodes)
    children: dict[Node | None, list[Node]] = {}
    above = list(weights)
    while above:
        node = above.pop()
        if node is not None:
            if node.parent not in weights:
                weights[node.parent] = 0
                above.append(node.parent)
            children.setdefault(node.parent, []).append(node)
    for node in sorted((n for n in weights if n is not None), key=lambda n: n.start, reverse=True):
        weights[node.parent] += weights[node]
    places: dict[Node | None, int] = {}
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            places[node] = len(places)
            continue
        stack.append((node, True))
        # The last one pushed goes first.
        below = sorted(children.get(node, ()), key=lambda child: (weights[child], -child.serial))
        stack += [(child, False) for child in below]
    return np.array([places[node] for node in nodes], dtype=np.int64)
