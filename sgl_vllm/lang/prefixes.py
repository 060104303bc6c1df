"""What the prompts of a batch begin with, found by tracing their program.

Owns which arguments a batch has in common. How a program is traced is in `tracing/`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence

from sgl_vllm.lang.environment import Environment
from sgl_vllm.lang.ir import AnyOrder, Expr, Text, Value
from sgl_vllm.lang.runnable import Runnable
from sgl_vllm.lang.tracing.nodes import PREFIX_EXPRESSIONS, Evaluate, Write, ends_prefix
from sgl_vllm.lang.tracing.standin import Leaf
from sgl_vllm.lang.tracing.trace import Graph, traced

PREFIX_MAX_S = 0.25
"""A trace for the shared prefix of a batch ends after this long."""

ORDERS_MAX_S = 1.0
"""At most this long, the `any_order`s of a batch are looked for."""


def known_prefix(graph: Graph, arguments: Mapping[str, Value] | None = None) -> tuple[Expr, ...]:
    """The known text and turns at the beginning of the root prompt, given `arguments`."""

    def value_of(leaf: Leaf) -> Value:
        if leaf.aspect != "argument":
            raise KeyError(str(leaf))
        return (arguments or {})[str(leaf.name)]

    environment = Environment(value_of)
    known: list[Expr] = []
    for node in graph.nodes_of(0):
        match node.operation:
            case Write(pieces):
                for piece in pieces:
                    text = None
                    with contextlib.suppress(Exception):  # unknown, or the run will raise it
                        text = environment.value(piece)
                    if not isinstance(text, str):
                        return tuple(known)
                    known.append(Text(text))
            case Evaluate(expr) if isinstance(expr, PREFIX_EXPRESSIONS):
                known.append(expr)
            case operation if ends_prefix(operation):
                break
    return tuple(known)


def shared_prefix(program: Runnable, items: Sequence[Mapping[str, Value]]) -> tuple[Expr, ...]:
    """The known text and turns that the prompts of all `items` (arguments by name) begin with.

    Arguments that are equal in all items, or that all leave at their default, count as known. The
    prefix ends at the first generation, fork, or text that depends on anything else, and where
    tracing ends. Never raises: () if nothing is known. Cost: one comparison per item and argument,
    and a call of the function up to the end of the prefix, of at most 0.25 s.
    """
    try:
        known = common_arguments(program, items)
        graph, _ = traced(program, known, PREFIX_MAX_S, is_prefix_only=True)
        return known_prefix(graph)
    except Exception:
        return ()


def first_any_orders(
    program: Runnable, items: Sequence[Mapping[str, Value]]
) -> Iterator[tuple[tuple[Expr, ...], AnyOrder]]:
    """For each item, the first `any_order` of its prompt and what the prompt has before it.

    Leaves out items where another operation comes first, or tracing ends. Never raises. Ends
    `ORDERS_MAX_S` seconds after the beginning. Cost: a call of the function per item, up to the
    `any_order`.
    """
    deadline_s = time.monotonic() + ORDERS_MAX_S
    defaults = common_arguments(program, ())
    for item in items:
        try:
            known = {**defaults, **program.bound, **item}
            graph, _ = traced(program, known, ORDERS_MAX_S, is_prefix_only=True)
            prompt = graph.nodes_of(0)
            if prompt and isinstance(prompt[-1].operation, Evaluate):
                expr = prompt[-1].operation.expr
                if isinstance(expr, AnyOrder):
                    yield known_prefix(graph), expr
        except Exception:
            continue
        if time.monotonic() > deadline_s:
            return


def common_arguments(program: Runnable, items: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The arguments that have one known value in all `items`, by name."""
    parameters = inspect.signature(program.func).parameters
    missing = object()
    arguments: dict[str, Value] = {}
    for name in program.arg_names:
        values: Iterator[Value] = (item.get(name, missing) for item in items)
        first = next(values, missing)
        is_common = all(_is_same(first, value) for value in values)
        if first is missing:
            first = program.bound.get(name, parameters[name].default)
        if is_common and first is not inspect.Parameter.empty:
            arguments[name] = first
    return arguments


def _is_same(left: object, right: object) -> bool:
    """Whether two arguments are equal, without running code of their classes."""
    if left is right:
        return True
    kinds = (str, int, float, bool, bytes)
    return type(left) is type(right) and type(left) in kinds and left == right
