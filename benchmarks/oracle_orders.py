"""The best orders of segments, by exhaustive search: what a sample of orders is compared with.

Owns the search. Knows nothing of how `any_order` chooses. Sets are small: a few, of a few segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

Sets = tuple[tuple[int, ...], ...]
"""Sorted, and each set sorted too: what can be shared does not depend on the order."""


def most_shared(sets: Iterable[Sequence[int]], weights: Mapping[int, int]) -> int:
    """How much prompts with these segments can share, in the best order of each.

    Shared is what an earlier prompt begins with, by weight. Cost: exponential in the number of
    sets; five sets of five take a few milliseconds.
    """
    listed = [tuple(sorted(one)) for one in sets]
    total = sum(weights[segment] for one in listed for segment in one)
    return total - _least_trie(tuple(sorted(listed)), weights, {})


def _least_trie(sets: Sets, weights: Mapping[int, int], known: dict[Sets, int]) -> int:
    """The least weight of a trie of all sets, over all their orders."""
    if sets in known:
        return known[sets]
    counts: dict[int, int] = {}
    for segment in itertools.chain(*sets):
        counts[segment] = counts.get(segment, 0) + 1
    # A set shares from the root on only by a first segment that another set has too.
    firsts = [[segment for segment in one if counts[segment] > 1] for one in sets]
    alone = sum(weights[s] for one, can in zip(sets, firsts, strict=True) if not can for s in one)
    sharing = [one for one, can in zip(sets, firsts, strict=True) if can]
    best: int | None = None
    for chosen in itertools.product(*(can for can in firsts if can)):
        groups: dict[int, list[tuple[int, ...]]] = {}
        for one, first in zip(sharing, chosen, strict=True):
            groups.setdefault(first, []).append(tuple(s for s in one if s != first))
        weight = sum(
            weights[first] + _least_trie(tuple(sorted(filter(None, group))), weights, known)
            for first, group in groups.items()
        )
        best = weight if best is None else min(best, weight)
    known[sets] = alone + (best or 0)
    return known[sets]


def most_continued(
    segments: Sequence[int], before: Iterable[Sequence[int]], weights: Mapping[int, int]
) -> int:
    """How much of one prompt the prompts `before` it begin with, in its best order of all."""
    best = 0
    for order in itertools.permutations(segments):
        for other in before:
            shared = 0
            for one, its in zip(order, other, strict=False):
                if one != its:
                    break
                shared += weights[one]
            best = max(best, shared)
    return best
