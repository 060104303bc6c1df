"""The pure operations that deferred values consist of, each under a name.

Owns the way from a name to a function. Operations are data, so that a graph can be described
without code: Python's operators, listed functions ("json.dumps", see `purity.py`), methods of
plain data (".upper") and makers of expressions ("sgl.gen").
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections import ChainMap
from collections.abc import Callable
from typing import Any  # Any: whatever Python's operators return

from sgl_vllm.lang import api
from sgl_vllm.lang.ir import Value, parts_of
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.tracing import purity

UNARY: dict[type[ast.unaryop], str] = {
    ast.UAdd: "pos",
    ast.USub: "neg",
    ast.Invert: "invert",
    ast.Not: "not_",
}
BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.BitOr: "or_",
    ast.BitAnd: "and_",
    ast.BitXor: "xor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.MatMult: "matmul",
}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Is: "is_",
    ast.IsNot: "is_not",
    ast.In: "in",
    ast.NotIn: "not_in",
}
_CONVERSIONS: dict[int, Callable[[Value], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


def _format(value: Value, conversion: int, spec: str) -> str:
    """A replacement field of an f-string."""
    return format(_CONVERSIONS[conversion](value) if conversion in _CONVERSIONS else value, spec)


def _concat(*parts: Any) -> Value:
    """Strings and expressions in a row."""
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return functools.reduce(operator.add, parts)


def _item_of(value: Value, index: int, count: int) -> Value:
    """Item `index` of the `count` that `value` is unpacked into."""
    items = tuple(value)
    if len(items) != count:
        raise ValueError(f"{len(items)} values to unpack into {count} names")
    return items[index]


MAKERS = ChainMap[str, Callable[..., Any]](api.MAKERS, {**PRIMITIVES})
"""Every function that makes expressions, by its name in a graph."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*UNARY.values(), *BINARY.values(), "getitem")},
    **{name: getattr(operator, name) for name in {*COMPARE.values()} - {"in", "not_in"}},
    "in": lambda item, container: item in container,
    "not_in": lambda item, container: item not in container,
    "getattr": getattr,
    "format": _format,
    "concat": _concat,
    "parts_of": parts_of,
    "item_of": _item_of,
    "list_of": lambda *items: [*items],
    "tuple_of": lambda *items: items,
    "set_of": lambda *items: {*items},
    "dict_of": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
}


@functools.cache
def function_named(name: str) -> Callable[..., Any]:
    """The function of an operation. KeyError for a name that is none."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.startswith("."):
        return purity.call_pure_method(name[1:])
    if name in MAKERS:
        return MAKERS[name]
    return purity.pure_function(name)


def materialized(value: Value, most: int | None = None) -> Value:
    """`value`, with a list of its first `most` items for an iterator or a view of a dict: a list
    can be read more than once."""
    is_lazy = hasattr(type(value), "__next__") or type(value) in _VIEWS
    return list(itertools.islice(value, most)) if is_lazy else value


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
