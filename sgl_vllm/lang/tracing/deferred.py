"""Values that only a run knows: named pure operations on arguments, variables and constants.

Owns the structure of such a value and how a run computes it. The operations are in `operations.py`.
Knows neither streams nor source code.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from sgl_vllm.lang.ir import Expr, Value, parts_of
from sgl_vllm.lang.tracing.operations import function_named, materialized


@dataclass(frozen=True)
class Argument:
    """An argument that the run gets."""

    name: str

    def __str__(self) -> str:
        return f"the argument {self.name!r}"


@dataclass(frozen=True)
class Definition:
    """Where a variable gets its value: node `node` of a graph.

    `name` is None for the prompt itself, as read at that node.
    """

    name: str | None
    node: int

    def __str__(self) -> str:
        return "the prompt's text" if self.name is None else f"s[{self.name!r}]"


@dataclass(frozen=True)
class Reading:
    """One aspect of a definition: a variable's value or meta information, a prompt's text or
    messages."""

    definition: Definition
    aspect: Literal["value", "meta", "text", "messages"]

    def __str__(self) -> str:
        return str(self.definition)


@dataclass(frozen=True)
class Prompt:
    """The state of a stream: the value of `return s`."""

    stream: int

    def __str__(self) -> str:
        return f"the prompt of stream {self.stream}"


Leaf: TypeAlias = Argument | Reading | Prompt

_TEXTS = frozenset(("format", "builtins.str", "builtins.repr", "json.dumps"))
"""Operations that surely give a string."""


@dataclass(frozen=True, eq=False, repr=False)
class Deferred:
    """A value that a run computes: a leaf, or `operation` of `args` and `kwargs`.

    Invariant: an operation is pure and has a name (`operations.function_named`), and `leaves` are
    all that the value depends on. An argument of an operation is a constant or another deferred
    value, never a container with one in it. `name` is the variable that an expression makes.
    """

    operation: str
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()
    leaf: Leaf | None = None
    name: str | None = None
    node: ast.expr | None = None
    leaves: frozenset[Leaf] = field(init=False)

    def __post_init__(self) -> None:
        own = frozenset((self.leaf,)) if self.leaf is not None else frozenset()
        object.__setattr__(self, "leaves", own.union(*(part.leaves for part in self.inputs)))

    @property
    def inputs(self) -> tuple[Deferred, ...]:
        """The deferred values that this one is computed from."""
        given = (*self.args, *(value for _, value in self.kwargs))
        return tuple(value for value in given if isinstance(value, Deferred))

    @property
    def is_expression(self) -> bool:
        """Whether it is surely a language expression, such as a `gen` with deferred options."""
        return self.operation.startswith("sgl.")

    @cached_property
    def is_text(self) -> bool:
        """Whether it is surely a string."""
        match self.operation, self.args:
            case "concat", pieces:
                return all(isinstance(p, str) or getattr(p, "is_text", False) for p in pieces)
            case ".join", (separator, *_):
                return isinstance(separator, str)
        return self.operation in _TEXTS

    @property
    def may_fail(self) -> bool:
        """Whether computing it may raise an error, given what it is computed from."""
        if self.operation == "concat":
            return not all(
                piece.is_text or piece.is_expression
                for piece in self.args
                if isinstance(piece, Deferred)
            )
        return self.operation not in ("leaf", "list_of", "tuple_of")

    @property
    def exprs(self) -> Iterator[Expr]:
        """The constant expressions that it, or what it is computed from, has as arguments."""
        done: set[Deferred] = set()
        for part in in_order(self, done):
            done.add(part)
            for given in (*part.args, *(value for _, value in part.kwargs)):
                if isinstance(given, Expr):
                    yield from parts_of(given)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of a concatenation, in order; any other value is its only piece."""
        return self.args if self.operation == "concat" else (self,)

    @property
    def head(self) -> str:
        """Known text that the value begins with."""
        match self.operation, self.args:
            case ("concat", (first, *_)) | (".join", (_, Deferred("list_of", (first, *_)))):
                return first if isinstance(first, str) else getattr(first, "head", "")
        return ""

    @cached_property
    def readings(self) -> tuple[Definition, ...]:
        """The definitions it depends on, in the program's order."""
        found = {leaf.definition for leaf in self.leaves if isinstance(leaf, Reading)}
        return tuple(sorted(found, key=lambda d: (d.node, d.name or "")))

    @property
    def source(self) -> str:
        """The expression as written in the program, or the leaf it reads."""
        if self.node is not None:
            return ast.unparse(self.node)
        if self.leaf is not None:
            return self.leaf.name if isinstance(self.leaf, Argument) else str(self.leaf)
        given = [f"{key}={source_of(value)}" for key, value in self.kwargs]
        inside = ", ".join([*map(source_of, self.args), *given])
        shape = {"list_of": "[{}]", "tuple_of": "({})"}.get(self.operation)
        return shape.format(inside) if shape else f"{self.operation}({inside})"

    def why(self) -> str:
        """What it depends on, for messages."""
        return " and ".join(sorted({str(leaf) for leaf in self.leaves})) or "a later value"

    def __bool__(self) -> bool:
        raise TypeError(f"{self.why()} is unknown while the program is traced")


Piece: TypeAlias = str | Expr | Deferred

Step: TypeAlias = Definition | Deferred
"""What a program's function does itself: it waits for a definition, or computes a value."""


def leaf(of: Leaf) -> Deferred:
    """The value of a leaf."""
    return Deferred("leaf", leaf=of)


def source_of(value: object) -> str:
    """A deferred value as it is written in the program, a constant as its `repr`."""
    return value.source if isinstance(value, Deferred) else repr(value)


def readings_of(values: Sequence[object]) -> tuple[Definition, ...]:
    """The definitions that any of `values` depends on."""
    found = (d for value in values if isinstance(value, Deferred) for d in value.readings)
    return tuple(dict.fromkeys(found))


def merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """`pieces` without empty strings, with neighboring strings as one."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece != "":
            result.append(piece)
    return tuple(result)


def in_order(wanted: Deferred, done: Container[Deferred]) -> Iterator[Deferred]:
    """`wanted` and all that it is computed from, each after its inputs and only once.

    Leaves out values in `done`, to which the caller must add each one that it gets. A value may
    depend on thousands of others, so this does not recurse.
    """
    stack = [wanted]
    while stack:
        missing = [part for part in stack[-1].inputs if part not in done]
        if missing:
            stack.extend(missing)
        elif (deferred := stack.pop()) not in done:
            yield deferred


class Environment(ABC):
    """The values of one run. Each deferred value is computed at most once."""

    def __init__(self) -> None:
        self._values: dict[Deferred, Value] = {}

    @abstractmethod
    def leaf(self, leaf: Leaf) -> Value:
        """The value of an argument, a variable or a prompt."""

    def value(self, wanted: Value) -> Value:
        """Compute `wanted`; a constant is its own value. Raises what the operation raises."""
        if not isinstance(wanted, Deferred):
            return wanted
        values = self._values
        for deferred in in_order(wanted, values):
            if deferred.leaf is not None:
                values[deferred] = self.leaf(deferred.leaf)
                continue
            args = [values[a] if isinstance(a, Deferred) else a for a in deferred.args]
            kwargs = {
                key: values[a] if isinstance(a, Deferred) else a for key, a in deferred.kwargs
            }
            values[deferred] = materialized(function_named(deferred.operation)(*args, **kwargs))
        return values[wanted]


class Arguments(Environment):
    """An environment that knows some arguments and nothing else."""

    def __init__(self, arguments: Mapping[str, Value]) -> None:
        super().__init__()
        self._arguments = arguments

    def leaf(self, leaf: Leaf) -> Value:
        assert isinstance(leaf, Argument)
        return self._arguments[leaf.name]

    def text_of(self, piece: object) -> str | None:
        """`piece` as text; None if it is unknown or no text."""
        if isinstance(piece, Deferred) and not all(
            isinstance(leaf, Argument) and leaf.name in self._arguments for leaf in piece.leaves
        ):
            return None
        try:
            value = self.value(piece)
        except Exception:  # the run will raise it
            return None
        return value if isinstance(value, str) else None
