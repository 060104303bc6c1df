"""Decides the order of an `any_order` when a program gets there.

Owns which source decides: an order that the same segments had, the plan of a batch, or this
process's memory of the backend. The search itself is in `planning.py`, which is pure.
"""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from sgl_vllm.lang import planning
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.ir import AnyOrder, Expr, Text
from sgl_vllm.lang.planning import SegmentId
from sgl_vllm.lang.transcript import Order, OrderSource, Transcript
from sgl_vllm.protocol.segments import digest_of

PlannedOrders: TypeAlias = Mapping[tuple[Hashable, frozenset[SegmentId]], tuple[SegmentId, ...]]
"""Orders by the prompt before them and the segments."""

NOTHING_PLANNED: PlannedOrders = types.MappingProxyType({})


def arranged(
    expr: AnyOrder,
    texts: Sequence[str],
    transcript: Transcript,
    backend: Backend,
    planned_orders: PlannedOrders,
) -> Order:
    """The order for the segments `texts` of `expr` after `transcript`. The backend remembers it."""
    held = {text for order in transcript.orders for text in order.segments}
    repeated = [i for i, text in enumerate(texts) if expr.repeated is not None and text in held]
    numbers = [i for i in range(len(texts)) if i not in repeated]
    ids = _ids_of([texts[i] for i in numbers])
    number_of = dict(zip(ids, numbers, strict=True))
    weights = {one: len(texts[i]) for one, i in number_of.items()}
    beginning = _beginning(transcript)
    memory = backend.orders.after(beginning)
    order: Sequence[SegmentId]
    source: OrderSource
    if (key := expr.key) is not None:
        order, source = sorted(ids, key=lambda one: key(texts[number_of[one]])), "key"
    elif (decided := memory.decided(ids)) is not None:
        order, source = decided, "memory"
    elif (plan := planned_orders.get((beginning, frozenset(ids)))) is not None:
        order, source = plan, "batch"
    else:
        suggested = memory.suggest(ids, weights)
        order = suggested.order
        is_learned = suggested.shared_weight or list(order) != ids
        source = "memory" if is_learned else "given"
    shared, as_given = memory.shared_weight(order, weights), memory.shared_weight(ids, weights)
    backend.orders.add(beginning, order)
    in_order = tuple(number_of[one] for one in order)
    return Order(tuple(texts), in_order, source, shared, as_given, tuple(repeated))


def pieces_of(expr: AnyOrder, order: Order, earlier: Sequence[Order]) -> list[str]:
    """The texts to append, of an order that follows those in `earlier`."""
    pieces = [order.segments[number] for number in order.order]
    for number in order.repeated:
        text = order.segments[number]
        before = next(one for one in earlier if text in one.segments)
        pieces.append(
            (expr.repeated or "").format(rank=number + 1, earlier=before.segments.index(text) + 1)
        )
    return [piece for piece in pieces if piece]


def places_of(order: Order, start: int) -> tuple[tuple[int, int], ...]:
    """The intervals of characters of the segments, in a text in which they begin at `start`."""
    texts = [order.segments[number] for number in order.order]
    ends = [*itertools.accumulate(map(len, texts), initial=start)]
    return tuple(place for place in itertools.pairwise(ends) if place[0] < place[1])


# -- all programs of a batch


def planned(found: Iterable[tuple[tuple[Expr, ...], AnyOrder]]) -> PlannedOrders:
    """Orders for all programs of a batch, so that together they share most.

    `found` has the beginning of each prompt, and the `any_order` that follows it.
    """
    by_beginning: dict[Hashable, list[list[SegmentId]]] = {}
    weights: dict[SegmentId, int] = {}
    for prefix, expr in found:
        if expr.key is not None:
            continue
        texts = [part.value for part in expr.segments if isinstance(part, Text)]
        if len(texts) < len(expr.segments):
            continue
        ids = _ids_of(texts)
        weights.update((one, len(text)) for one, text in zip(ids, texts, strict=True))
        beginning = _beginning(Transcript.of(prefix))
        by_beginning.setdefault(beginning, []).append(ids)
    orders: dict[tuple[Hashable, frozenset[SegmentId]], tuple[SegmentId, ...]] = {}
    for beginning, sets in by_beginning.items():
        if len(sets) > 1:
            for order in planning.plan(sets, weights):
                orders.setdefault((beginning, frozenset(order)), tuple(order))
    return orders


def mentions(function: Callable[..., object], name: str) -> bool:
    """Whether the code of `function`, with the functions inside of it, has the name `name`."""
    code = getattr(function, "__code__", None)
    stack = [code] if isinstance(code, types.CodeType) else []
    while stack:
        code = stack.pop()
        if name in code.co_names:
            return True
        stack += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return False


# -- one program


def _ids_of(texts: Sequence[str]) -> list[SegmentId]:
    seen: Counter[bytes] = Counter()
    ids = []
    for text in texts:
        digest = digest_of(text)
        ids.append((digest, seen[digest]))
        seen[digest] += 1
    return ids


def _beginning(transcript: Transcript) -> Hashable:
    """What stands before the segments, as far as it decides whether they are shared."""
    return hash((transcript.prompt(), transcript.role))
