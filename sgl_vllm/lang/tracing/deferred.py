"""Values that are not known yet: pure functions of a program's arguments and variables.

Owns how such a value is put together while a program is traced, and how it is computed in a run.
Knows no source code (`evaluation.py`) and no streams (`trace.py`, `compiler.py`).
"""

from __future__ import annotations

import ast
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang.ir import Expr


@dataclass(frozen=True)
class Argument:
    """An argument that a run is given."""

    name: str

    def __str__(self) -> str:
        return f"the argument {self.name!r}"


@dataclass(frozen=True)
class Definition:
    """The place where a variable got its value: node `node` of a graph, on stream `stream`.

    `name` is None for the prompt itself, read at that node.
    """

    name: str | None
    stream: int
    node: int

    def __str__(self) -> str:
        return "the prompt's text" if self.name is None else f"s[{self.name!r}]"


@dataclass(frozen=True)
class Reading:
    """What is read of a definition: a variable's value or meta information; a prompt's text or
    messages."""

    definition: Definition
    aspect: Literal["value", "meta", "text", "messages"]

    def __str__(self) -> str:
        return str(self.definition)


@dataclass(frozen=True)
class Prompt:
    """A stream of the program itself, as a value: what a program that returns `s` returns."""

    stream: int

    def __str__(self) -> str:
        return f"the prompt of stream {self.stream}"


@dataclass(frozen=True, eq=False)
class Element:
    """An item of a sequence that is not known yet, or what a function of it is called with."""

    name: str

    def __str__(self) -> str:
        return f"the item {self.name!r}"


Leaf: TypeAlias = Argument | Reading | Prompt | Element
Piece: TypeAlias = "str | Expr | Deferred"


@dataclass(frozen=True, eq=False)
class Deferred:
    """A value that a run will know: a leaf, or `function` of `inputs`.

    Invariant: `function` has no side effect, and `leaves` are those that it depends on. A
    concatenation has `pieces`, in order. One that is surely an expression, such as a `gen` whose
    options are not known, has its `kind` ("gen") and the `name` of the variable that it makes.
    `head` is known text that the value begins with. A lazy one's function gets, instead of its
    inputs, the environment, and asks it for those that it needs; it gives the elements in `binds`
    their values itself.
    """

    function: Callable[..., Any] | None
    inputs: tuple[Deferred, ...] = ()
    leaf: Leaf | None = None
    node: ast.expr | None = None
    pieces: tuple[Piece, ...] = ()
    kind: str | None = None
    name: str | None = None
    head: str = ""
    is_lazy: bool = False
    binds: frozenset[Leaf] = frozenset()
    leaves: frozenset[Leaf] = field(init=False)

    def __post_init__(self) -> None:
        own = frozenset((self.leaf,)) if self.leaf is not None else frozenset()
        leaves = own.union(*(part.leaves for part in self.inputs)) - self.binds
        object.__setattr__(self, "leaves", leaves)

    @property
    def readings(self) -> tuple[Definition, ...]:
        """The definitions it depends on, in the program's order."""
        found = {leaf.definition for leaf in self.leaves if isinstance(leaf, Reading)}
        return tuple(sorted(found, key=lambda d: (d.node, d.name or "")))

    @property
    def source(self) -> str:
        """The expression as it stands in the program, or what it is read from."""
        if self.node is not None:
            return ast.unparse(self.node)
        return self.leaf.name if isinstance(self.leaf, (Argument, Element)) else str(self.leaf)

    def why(self) -> str:
        """What it depends on, for messages."""
        return " and ".join(sorted({str(leaf) for leaf in self.leaves})) or "a later value"

    def __bool__(self) -> bool:
        raise TypeError(f"{self.why()} is not known while the program is traced")

    def __repr__(self) -> str:
        return f"<deferred {self.source}>"


class Environment(ABC):
    """The values of one run. Each deferred value is computed at most once in it."""

    def __init__(self) -> None:
        self._values: dict[Deferred, Any] = {}

    @abstractmethod
    def leaf(self, leaf: Leaf) -> Any:
        """The value of an argument, a variable or a prompt."""

    def value(self, wanted: Deferred) -> Any:
        """Computes `wanted` and what it is made of; raises what the program's expression does.

        A value may be made of thousands of others: only lazy ones recurse.
        """
        values = self._values
        stack = [wanted]
        while stack:
            deferred = stack[-1]
            if deferred in values:
                stack.pop()
                continue
            if not self._is_own(deferred):
                values[deferred] = self._outside(deferred)
                continue
            if deferred.is_lazy:
                assert deferred.function is not None
                values[deferred] = deferred.function(self)
                continue
            missing = [part for part in deferred.inputs if part not in values]
            if missing:
                stack.extend(missing)
                continue
            if deferred.leaf is not None:
                values[deferred] = self.leaf(deferred.leaf)
            else:
                assert deferred.function is not None
                values[deferred] = deferred.function(*[values[part] for part in deferred.inputs])
            stack.pop()
        return values[wanted]

    def within(self, elements: Mapping[Leaf, Any]) -> Environment:
        """An environment in which `elements` have these values, and all else is as in this one."""
        return _Inner(self, elements)

    def _is_own(self, deferred: Deferred) -> bool:
        return True

    def _outside(self, deferred: Deferred) -> Any:
        raise NotImplementedError

    def filled(self, template: Template) -> Any:
        """The value of a template, in new lists, dicts and sets."""
        return template.fill([self.value(part) for part in template.inputs])


class _Inner(Environment):
    """What does not depend on the elements is computed outside, once for all of them."""

    def __init__(self, outer: Environment, elements: Mapping[Leaf, Any]) -> None:
        super().__init__()
        self._outer = outer
        self._elements = elements

    def leaf(self, leaf: Leaf) -> Any:
        return self._elements[leaf]

    def _is_own(self, deferred: Deferred) -> bool:
        return deferred.leaf in self._elements or (
            deferred.leaf is None and any(leaf in self._elements for leaf in deferred.leaves)
        )

    def _outside(self, deferred: Deferred) -> Any:
        return self._outer.value(deferred)


# --- templates: structures of known and deferred values ------------------------------------------


@dataclass(frozen=True)
class _Slot:
    index: int


@dataclass(frozen=True)
class _Rebuilt:
    """A list, tuple, set, slice or dict (as its flat keys and values) to make anew."""

    kind: type
    parts: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Template:
    """A snapshot of a value that may hold deferred ones, which are its `inputs`."""

    shape: Any
    inputs: tuple[Deferred, ...]

    def fill(self, values: Sequence[Any]) -> Any:
        return _fill(self.shape, values)


def template_of(
    value: object, is_own: Callable[[object], bool], as_deferred: Callable[[object], object]
) -> Template:
    """A snapshot of `value`: containers that the program made itself (`is_own`) are copied.

    `as_deferred` may put a deferred value in the place of one.
    """
    inputs: dict[Deferred, int] = {}

    def shape(value: Any) -> Any:
        value = as_deferred(value)
        if isinstance(value, Deferred):
            return _Slot(inputs.setdefault(value, len(inputs)))
        kind = type(value)
        if kind is slice:
            return _Rebuilt(slice, tuple(map(shape, (value.start, value.stop, value.step))))
        if kind is dict and is_own(value):
            return _Rebuilt(dict, tuple(shape(part) for pair in value.items() for part in pair))
        if kind in (list, tuple, set, frozenset) and is_own(value):
            return _Rebuilt(kind, tuple(map(shape, value)))
        return value

    return Template(shape(value), tuple(inputs))


def _fill(shape: Any, values: Sequence[Any]) -> Any:
    if isinstance(shape, _Slot):
        return values[shape.index]
    if not isinstance(shape, _Rebuilt):
        return shape
    parts = [_fill(part, values) for part in shape.parts]
    if shape.kind is dict:
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return slice(*parts) if shape.kind is slice else shape.kind(parts)


def lifted(
    function: Callable[..., Any],
    template: Template,
    node: ast.expr | None = None,
    **about: Any,
) -> Deferred:
    """`function(*args, **kwargs)` of a run's values; `template` is of the pair (args, kwargs)."""

    def compute(*values: Any) -> Any:
        args, kwargs = template.fill(values)
        return function(*args, **kwargs)

    return Deferred(compute, template.inputs, node=node, **about)


def lazily(
    function: Callable[..., Any],
    templates: Sequence[Template],
    node: ast.expr | None = None,
    binds: frozenset[Leaf] = frozenset(),
) -> Deferred:
    """``function(environment, *templates)``, which fills those templates that it needs."""

    def compute(environment: Environment) -> Any:
        return function(environment, *templates)

    inputs = dict.fromkeys(part for template in templates for part in template.inputs)
    return Deferred(compute, tuple(inputs), node=node, is_lazy=True, binds=binds)


def pieces_of(value: str | Expr | Deferred) -> tuple[Piece, ...]:
    """What a concatenation is made of; a value that is none is its only piece."""
    if isinstance(value, Deferred):
        return value.pieces or (value,)
    return (value,) if value != "" else ()


def concatenation(pieces: Sequence[Piece], node: ast.expr | None = None) -> Deferred:
    """``a + b + c`` of strings, expressions and deferred values, one of them deferred."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    inputs = tuple(dict.fromkeys(piece for piece in merged if isinstance(piece, Deferred)))
    places = [inputs.index(p) if isinstance(p, Deferred) else None for p in merged]

    def compute(*values: Any) -> Any:
        parts = [p if i is None else values[i] for p, i in zip(merged, places, strict=True)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        return functools.reduce(operator.add, parts)

    first = merged[0]
    head = first if isinstance(first, str) else first.head if isinstance(first, Deferred) else ""
    return Deferred(compute, inputs, node=node, pieces=tuple(merged), head=head)


class Arguments(Environment):
    """An environment in which only some arguments are known."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._arguments = arguments

    def leaf(self, leaf: Leaf) -> Any:
        assert isinstance(leaf, Argument)
        return self._arguments[leaf.name]

    def text_of(self, piece: str | Deferred) -> str | None:
        """The piece as text, None if that is not known, or is no text."""
        if isinstance(piece, str):
            return piece
        if not all(
            isinstance(leaf, Argument) and leaf.name in self._arguments for leaf in piece.leaves
        ):
            return None
        try:
            value = self.value(piece)
        except Exception:  # which the run will raise
            return None
        return value if isinstance(value, str) else None
