"""Pure functions that deferred values are made of, and questions about values.

Owns what an operator, a condition or a comprehension computes in a run.
"""

from __future__ import annotations

import ast
import enum
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sgl_vllm.lang.ir import Expr
from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import Deferred, Environment, Leaf, Piece, Template, pieces_of
from sgl_vllm.lang.tracing.frames import Host

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))

UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.MatMult: operator.matmul,
}


def _in(item: Any, container: Any) -> bool:
    return item in container


def _not_in(item: Any, container: Any) -> bool:
    return item not in container


COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: _in,
    ast.NotIn: _not_in,
}
_CONVERSIONS: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


def formatted(value: Any, conversion: int, spec: str) -> str:
    return format(_CONVERSIONS[conversion](value) if conversion in _CONVERSIONS else value, spec)


def item_of(value: Any, index: int, count: int) -> Any:
    items = tuple(value)
    if len(items) != count:
        raise ValueError(f"{len(items)} values to unpack into {count} names")
    return items[index]


def chained(kind: type, *parts: Any) -> Any:
    return kind(itertools.chain.from_iterable(parts))


def dict_of(keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def all_of(environment: Environment, *operands: Template) -> Any:
    value: Any = True
    for operand in operands:
        value = environment.filled(operand)
        if not value:
            break
    return value


def any_of(environment: Environment, *operands: Template) -> Any:
    value: Any = False
    for operand in operands:
        value = environment.filled(operand)
        if value:
            break
    return value


def chosen(environment: Environment, test: Template, then: Template, otherwise: Template) -> Any:
    return environment.filled(then if environment.filled(test) else otherwise)


def compared(
    functions: Sequence[Callable[[Any, Any], Any]], environment: Environment, *operands: Template
) -> Any:
    left, result = environment.filled(operands[0]), True
    for function, operand in zip(functions, operands[1:], strict=True):
        right = environment.filled(operand)
        result = function(left, right)
        if not result:
            break
        left = right
    return result


def comprehended(
    element: Leaf, environment: Environment, items: Template, body: Template, *tests: Template
) -> list[Any]:
    scopes = (environment.within({element: item}) for item in environment.filled(items))
    return [s.filled(body) for s in scopes if all(s.filled(test) for test in tests)]


def function_of(
    elements: Sequence[Leaf], environment: Environment, body: Template
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return environment.within(dict(zip(elements, args, strict=True))).filled(body)

    return call


def ordered_by(function: Any, items: list[Any], keys: list[Any], **options: Any) -> Any:
    """`function` (sorted, max, min) of `items` by their `keys`."""
    if not items and "default" in options:
        return options["default"]
    found = function(range(len(items)), key=keys.__getitem__, **options)
    return [items[i] for i in found] if function is sorted else items[found]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, giving a list where it gives an iterator: that can be read more than once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return list(result) if hasattr(result, "__next__") else result

    return call


# --- helpers -------------------------------------------------------------------------------------


def shown(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= 80 else line[:77] + "..."


def type_name(value: object) -> str:
    if isinstance(value, Host):
        return value.description
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__qualname__}"


PLAIN_LOOKUPS: tuple[Any, ...] = (
    object.__getattribute__,
    type.__getattribute__,
    *(kind.__getattribute__ for kind in (types.FunctionType, BaseException, tuple, str, int)),
)


def is_made_plainly(kind: type) -> bool:
    """Whether calling the class runs nobody's code."""
    if isinstance(kind, enum.EnumMeta):
        return purity.makes_members(kind)
    initializers = (getattr(kind, "__init__", None), getattr(kind, "__new__", None))
    return issubclass(kind, BaseException) and not any(
        isinstance(part, types.FunctionType) for part in initializers
    )


def callable_name(value: Any) -> str:
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__
    return type_name(value)


def is_text(value: Any) -> bool:
    if isinstance(value, Deferred):
        return bool(value.pieces) or value.kind is not None
    return isinstance(value, (str, Expr))


def is_known_text(value: Any) -> bool:
    return isinstance(value, (str, Deferred))


def pieces_in(value: Any) -> tuple[Piece, ...]:
    return (value,) if isinstance(value, Expr) else pieces_of(value)


def has_variable(value: Any) -> bool:
    if isinstance(value, Deferred):
        return value.name is not None or any(map(has_variable, value.pieces))
    return isinstance(value, Expr)


def has_identity_only(value: Any) -> bool:
    """Whether == on it runs nobody's code, because nobody defined it."""
    equals: Any = type(value).__eq__
    return isinstance(value, type) or equals is object.__eq__ or value is None


def own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of functions in it."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
