"""Stand-ins: values that only a run knows, as a traced program and its graph have them.

Owns how a program may combine them, how text that holds them is read back, and which variables
expressions with stand-ins in them make and read.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn  # Any: whatever operators take and return

from sgl_vllm.lang.ir import Expr, ExprList, Text, Value, names_made, parts_of
from sgl_vllm.lang.tracing.errors import RUN_IT, CallableT, captured_by, is_tracing, stop, unwatched


@dataclass(frozen=True)
class Definition:
    """Where a variable gets its value: node `node` of a graph.

    `name` is None for the prompt itself, as read at that node.
    """

    name: str | None
    node: int


@dataclass(frozen=True)
class Leaf:
    """What a run gives: an argument, an aspect of a definition, or the state of a stream."""

    aspect: Literal["argument", "value", "meta", "text", "messages", "state"]
    name: str | None = None
    definition: Definition | None = None
    stream: int | None = None

    def __str__(self) -> str:
        match self.aspect:
            case "argument":
                return f"the argument {self.name!r}"
            case "value":
                return f"s[{self.name!r}]"
            case "meta":
                return f"s.get_meta_info({self.name!r})"
            case "state":
                return f"the prompt of stream {self.stream}"
        return f"s.{self.aspect}()"


class Recorded:
    """A prompt of a traced program."""

    as_standin: Callable[[], StandIn]


@dataclass
class Notes:
    """What a trace notes: stand-ins written into text, and the function's actions (see `Graph`)."""

    formatted: list[StandIn] = field(default_factory=list)
    actions: list[StandIn] = field(default_factory=list)


notes: ContextVar[Notes] = ContextVar("sgl_vllm_notes")
"""Of the trace that is running."""

_TEXT_METHODS = frozenset(["lower", "lstrip", "replace", "rstrip", "strip", "title", "upper"])
"""Methods of texts that give a text, which a run calls."""


class StandIn(Expr):
    """Stands for a value that only a run knows: a leaf, or `operation` of `args` and `kwargs`.

    A program may append it, add to it, format it, index it, and call some methods of texts. All
    else needs the value, and ends the trace. Other names than `_names` are the value's attributes.
    """

    _leaf: Leaf | None = None
    _name: str | None = None
    """The variable that it makes, as an expression."""

    def __init__(
        self,
        operation: str,
        function: Callable[..., Any],
        args: Sequence[Value] = (),
        kwargs: Mapping[str, Value] | None = None,
        *,
        is_text: bool = False,
        is_expr: bool = False,
    ) -> None:
        self._operation = operation
        self._function = function
        self._args = tuple(fixed(arg) for arg in args)
        self._kwargs = {key: fixed(arg) for key, arg in (kwargs or {}).items()}
        self._is_text, self._is_expr = is_text, is_expr
        given = (*self._args, *self._kwargs.values())
        found = (leaf for part in given if isinstance(part, StandIn) for leaf in part._leaves)
        self._leaves: dict[Leaf, None] = dict.fromkeys(found)
        if is_tracing():
            notes.get().actions.append(self)

    @classmethod
    def of(cls, leaf: Leaf, *, is_text: bool = False) -> StandIn:
        """The value of a leaf, which is no action."""
        self = cls.__new__(cls)
        self._operation, self._args, self._kwargs = "leaf", (), {}
        self._leaf, self._leaves = leaf, {leaf: None}
        self._is_text, self._is_expr = is_text, False
        return self

    def __getitem__(self, key: Value) -> StandIn:
        return StandIn("getitem", operator.getitem, (self, key))

    def __add__(self, other: Value) -> Value:
        return _added(self, other)

    def __radd__(self, other: Value) -> Value:
        return _added(other, self)

    def __format__(self, spec: str) -> str:
        """A mark that stands for the text until that is appended (`pieces_of`)."""
        if not is_tracing():
            self._refuse()
        formatted = notes.get().formatted
        formatted.append(StandIn("format", format, (self, spec), is_text=True))
        return f"{_OPEN}{len(formatted) - 1}{_CLOSE}"

    def __repr__(self) -> str:
        if is_tracing():
            self._refuse()
        return f"<{source_of(self)}>"

    def __getattr__(self, name: str) -> Callable[..., StandIn]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _TEXT_METHODS:
            asks_for(self, f"attribute {name!r}")

        def call(text: Value, *args: Value) -> Value:
            return getattr(text, name)(*args)

        return lambda *args: StandIn(f".{name}", call, (self, *args))

    def _refuse(self, *_: object) -> NoReturn:
        asks_for(self, "value")

    __str__ = __repr__
    __bool__ = __len__ = __iter__ = __contains__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bytes__ = _refuse


def asks_for(value: StandIn, what: str) -> NoReturn:
    """End the trace where the program asks for what only a run knows."""
    arguments = [leaf.name for leaf in value._leaves if leaf.aspect == "argument"]
    advice = f"append it, write it in an f-string, compute with it in sgl.tool(...), or {RUN_IT}"
    if len(arguments) == len(value._leaves):
        given = ", ".join(f"{name}=..." for name in arguments)
        advice = f"give the argument, as in compile({given}), or {RUN_IT}"
    stop(f"the program asks {why(value)} for its {what}, which only a run knows", advice)


def refuse_text(what: str) -> NoReturn:
    """End the trace where the program asks text that holds such a value."""
    reason = f"the program asks text with a value that only a run knows for its {what}"
    stop(reason, f"append the text as it is, or {RUN_IT}")


def why(value: StandIn) -> str:
    """What makes a value unknown."""
    return ", ".join(map(str, value._leaves)) or "a later value"


def concatenated(*parts: Any) -> Value:
    """Strings and expressions in a row."""
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return functools.reduce(operator.add, parts)


def _is_text(value: Value) -> bool:
    """Whether what is added to `value` is text, or an expression."""
    if isinstance(value, StandIn):
        return value._is_text or value._operation == "concat"
    return isinstance(value, str)


def _added(left: Value, right: Value) -> Value:
    sides = (left, right)
    is_expr = any(isinstance(s, Expr) and getattr(s, "_is_expr", True) for s in sides)
    if is_expr and all(isinstance(side, str | Expr) for side in sides):
        return ExprList((*parts_of(left), *parts_of(right)))
    if not any(map(_is_text, sides)):
        return StandIn("add", operator.add, sides)  # numbers, lists, texts
    # An empty text counts: what it cannot be added to raises the error that it does in a run.
    return concatenation([piece for side in sides for piece in pieces_of(side) or [side]])


# --- text and containers with stand-ins in them --------------------------------------------------

# Around the number of a formatted stand-in in text: private characters, which programs do not have.
_OPEN, _CLOSE = "\U000f5617", "\U000f5618"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


def pieces_of(value: Value) -> list[Value]:
    """The parts of a text: known text, and stand-ins for the rest. Stops where the text of a value
    was changed after it was written, because the value itself would change otherwise."""
    if isinstance(value, StandIn) and value._operation == "concat":
        return [*value._args]
    if not isinstance(value, str):
        return [value]
    if not holds_standin(value):
        return [value] if value else []
    parts: list[Value] = [*_MARK.split(value)]
    if any(map(holds_standin, parts[::2])):
        refuse_text("characters")
    parts[1::2] = [notes.get().formatted[int(number)] for number in parts[1::2]]
    return [part for part in parts if isinstance(part, StandIn) or part]


_CONTAINERS: dict[type, Callable[..., Any]] = {
    list: lambda *items: [*items],
    tuple: lambda *items: items,
    set: lambda *items: {*items},
    dict: lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
}


def holds_standin(value: Value) -> bool:
    """Whether `value` is a stand-in, or has one in it."""
    match value:
        case StandIn() | Recorded():
            return True
        case str():
            return _OPEN in value or _CLOSE in value
        case Text(text):
            return holds_standin(text)
        case ExprList(items):
            return any(map(holds_standin, items))
        case dict():
            return any(map(holds_standin, (*value.keys(), *value.values())))
    return type(value) in _CONTAINERS and any(map(holds_standin, value))


def fixed(value: Value) -> Value:
    """`value` as a graph has it. What holds a stand-in becomes an operation that makes it anew."""
    if isinstance(value, StandIn) or not holds_standin(value):
        return value
    match value:
        case Recorded():
            return value.as_standin()
        case Text(text):
            return fixed(text)
        case str():
            pieces = pieces_of(value)
            return pieces[0] if len(pieces) == 1 else concatenation(pieces)
        case ExprList(items):
            return StandIn("concat", concatenated, items)
        case dict():
            return StandIn("dict", _CONTAINERS[dict], [*sum(value.items(), ())])
    return StandIn(type(value).__name__, _CONTAINERS[type(value)], [*value])


def concatenation(pieces: Sequence[Value]) -> StandIn:
    """The text of `pieces`, of which one at least is a stand-in."""
    is_text = all(isinstance(piece, str) or piece._is_text for piece in pieces)
    return StandIn("concat", concatenated, pieces, is_text=is_text)


def source_of(value: object) -> str:
    """A stand-in much as the program writes it, a constant as its `repr`."""
    if not isinstance(value, StandIn):
        return value.__name__ if inspect.isroutine(value) else repr(value)
    if value._leaf is not None:
        return str(value._leaf).removeprefix("the argument ").strip("'")
    operation, parts = value._operation, [source_of(arg) for arg in value._args]
    if operation == "format":
        return f"{parts[0]}:{value._args[1]}" if value._args[1] else parts[0]
    if operation == "getitem":
        return f"{parts[0]}[{parts[1]}]"
    if operation.startswith("."):
        return f"{parts[0]}{operation}({', '.join(parts[1:])})"
    if operation in ("add", "concat"):
        return " + ".join(parts)
    options = [f"{key}={source_of(arg)}" for key, arg in value._kwargs.items()]
    return f"{operation}({', '.join(parts + options)})"


def definitions_in(values: Sequence[object]) -> tuple[Definition, ...]:
    """The definitions that any of `values` depends on."""
    leaves = [leaf for value in values if isinstance(value, StandIn) for leaf in value._leaves]
    return tuple(dict.fromkeys(leaf.definition for leaf in leaves if leaf.definition is not None))


# --- expressions with stand-ins in them, such as ``sgl.gen("x", stop=s["end"])`` -------------


def deferrable(maker: CallableT) -> CallableT:
    """Let `maker`, which makes an expression, be given stand-ins while a program is traced. Cost:
    0.2 microseconds per call."""

    @unwatched
    def traced(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for value in given:
            for part in value if isinstance(value, list | tuple) else (value,):
                _refuse_captured(part)
        if not any(map(holds_standin, given)):
            return maker(*args, **kwargs)
        made = StandIn(maker.__name__, maker, args, kwargs, is_expr=True)
        made._name = _name_made(maker, args, kwargs)
        return made

    @functools.wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if is_tracing() else maker(*args, **kwargs)

    return make  # type: ignore[return-value]


def _name_made(
    maker: Callable[..., Any], args: Sequence[Value], kwargs: Mapping[str, Value]
) -> str | None:
    """The variable that ``maker(...)`` makes, if any."""
    first = next(iter(inspect.signature(maker).parameters))
    if first not in ("name", "answer"):
        return None
    given = args[0] if args else kwargs.get(first)
    if isinstance(given, Expr) and not isinstance(given, StandIn):
        names = names_of(given)
        return names[-1] if names else None
    if holds_standin(given):
        stop(f"the name of a variable depends on {why(fixed(given))}")
    assert given is None or isinstance(given, str)
    return given


def names_of(expr: Expr) -> list[str]:
    """The variables that an expression makes."""
    if isinstance(expr, ExprList):
        return [name for item in expr.items for name in names_of(item)]
    if isinstance(expr, StandIn):
        return [] if expr._name is None else [expr._name]
    return [*names_made(expr)]


def exprs_in(value: object) -> Iterator[Expr]:
    """The expressions that a value or its arguments have."""
    if isinstance(value, StandIn):
        for part in (*value._args, *value._kwargs.values()):
            yield from exprs_in(part)
    elif isinstance(value, Expr):
        yield from parts_of(value)


def _refuse_captured(function: Value) -> None:
    """Stop at a function that uses a stand-in or a prompt of the trace: no run would give it the
    value."""
    if any(map(holds_standin, captured_by(function))):
        stop(
            f"the local function {function.__name__} uses a value that only a run knows",
            f"pass the value as an argument, or {RUN_IT}",
        )
