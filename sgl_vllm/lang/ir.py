"""The expressions a program consists of, as immutable values.

Owns what a program *says*. `api.py` has the functions that make expressions, `execution.py` gives
them their meaning, and backends carry them out. Expressions concatenate with ``+``, also with
plain strings.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields, replace

# Any: values of the user's types, streams
from typing import Any, ClassVar, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.constraints import Constraint, Parser
from sgl_vllm.lang.media import Media, ServiceOptions, Voice
from sgl_vllm.lang.reasoning import ReasoningFormat
from sgl_vllm.lang.sampling import Sampling

Role: TypeAlias = Literal["system", "user", "assistant"]

Value: TypeAlias = Any
"""A value of a program: of any type that the user has, or as tracing stands in for it."""
Values: TypeAlias = Mapping[str, Value]
"""Variables' values by name."""


T_co = TypeVar("T_co", covariant=True, default=Any)


class Expr:
    """Anything that can be appended to a program with ``s += ...``. `_called` names it in messages,
    together with the variable `name` if it has one."""

    _called: ClassVar[str]
    name: str | None

    def __str__(self) -> str:
        name = getattr(self, "name", None)
        return f"{self._called} {name!r}" if name else self._called

    def __add__(self, other: Expr | str) -> ExprList:
        return ExprList((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> ExprList:
        return ExprList((*parts_of(other), *parts_of(self)))

    def __format__(self, spec: str) -> str:
        """An f-string would hold the expression's description in place of what it generates."""
        raise TypeError(
            f"{self!s} cannot be formatted into a string: append it with +, as in "
            f"s += 'text' + sgl.gen('name'), and format its value, s['name']"
        )


@dataclass(frozen=True)
class ExprList(Expr):
    """Expressions to run one after the other."""

    items: tuple[Expr, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.items))


@dataclass(frozen=True)
class Text(Expr):
    """Constant text."""

    value: str

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= 40 else self.value[:37] + "..."
        return f"text {shown!r}"


class VariableExpr(Expr, Generic[T_co]):
    """An expression that makes a variable of type `T_co`. ``s[expr]`` reads it."""


def name_of(key: str | VariableExpr) -> str:
    """The name of a variable, given as such or by the expression that makes it. TypeError for an
    expression without a name, or with several values."""
    if not isinstance(key, VariableExpr):
        return key
    if key.name is None:
        raise TypeError(
            f"a {key!s} without a name makes no variable: give it a name to read its value"
        )
    if isinstance(key, Gen) and (key.sampling.n or 1) > 1:
        raise TypeError(f"{key!s} makes a list of n values: read it by its name, s[{key.name!r}]")
    return key.name


def refuse_joined(key: str | VariableExpr, is_joined: bool) -> None:
    """TypeError for reading a joined variable by its expression, whose type it does not have."""
    if is_joined and isinstance(key, VariableExpr):
        raise TypeError(
            f"{key.name!r} is a list that a join made: read it by its name, s[{key.name!r}], or "
            f"read each branch by its expression"
        )


@dataclass(frozen=True)
class Gen(VariableExpr[T_co]):
    """Generate text, store it under `name` and append it.

    `parse` turns the generated text into the variable's value (typed variables); the appended text
    stays as generated. If `parse` rejects a text, it is generated again, at most `retries` times.
    With `reasoning`, the model's reasoning is split off first and kept in a variable of its own.
    """

    _called = "gen"

    name: str | None
    sampling: Sampling
    constraint: Constraint | None = None
    parse: Parser | None = None
    retries: int = 0
    reasoning: ReasoningFormat | None = None

    @property
    def reasoning_name(self) -> str | None:
        """The variable that holds the reasoning."""
        if self.reasoning is None or self.name is None:
            return None
        return f"{self.name}_reasoning_content"


@dataclass(frozen=True)
class Select(VariableExpr[T_co]):
    """Append the most likely of `choices` and store it under `name`."""

    _called = "select"

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    parse: Parser | None = None


@dataclass(frozen=True)
class Var(Expr):
    """Append the text of a variable made earlier in the program, without waiting for it."""

    _called = "var"

    name: str


@dataclass(frozen=True, eq=False)
class AnyOrder(Expr):
    """Append `segments`, texts and variables' texts, in an order that is chosen when they are
    appended.

    With `key`, that order depends on the segments alone. `repeated` is a template for what stands
    for a segment that the prompt has already. `reuses` says that the server may reuse their KV from
    another place.
    """

    segments: tuple[Text | Var, ...]
    key: Callable[[str], Any] | None = None
    repeated: str | None = None
    reuses: bool = False

    def __str__(self) -> str:
        return f"any_order of {len(self.segments)}"


@dataclass(frozen=True, eq=False)
class Computed(Expr):
    """Append what `function` makes: a string or an expression, which runs in this place.

    The expression may read the variables that the prompt has here. `name` is the variable that it
    makes, if any. The function runs on the language's event loop: it waits for what it needs, and
    must not block. Only `graph_run.py` makes it.
    """

    function: Callable[[], Coroutine[Any, Any, Expr | str]]
    name: str | None = None

    def __str__(self) -> str:
        return "computed text" if self.name is None else f"computed {self.name!r}"


@dataclass(frozen=True, eq=False)
class Tool(VariableExpr[T_co]):
    """Call `function`, append its result as text and store it under `name`.

    `Var` arguments are replaced by the variables' values. A plain function runs in a thread, a
    coroutine function on the language's event loop. If `is_read_only`, the call may come before its
    turn.
    """

    name: str | None
    function: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    is_read_only: bool = False

    def with_values(self, values: Values) -> Tool[T_co]:
        """The same call with values in the place of variables."""

        def filled(argument: object) -> object:
            return values[argument.name] if isinstance(argument, Var) else argument

        args = tuple(filled(argument) for argument in self.args)
        kwargs = tuple((key, filled(argument)) for key, argument in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def called(self) -> str:
        """The function's name, or its type's."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __str__(self) -> str:
        return f"tool {self.called}" + (f" for {self.name!r}" if self.name else "")


@dataclass(frozen=True, eq=False)
class Block(Expr):
    """Let `function` write the prompt from here on, and go on where it ends.

    `function` receives a stream that continues the prompt, and returns the variables `names`. The
    other variables of that stream end with the block. `kind` names the block in messages.
    """

    kind: str
    names: tuple[str, ...]
    function: Callable[[Any], Coroutine[Any, Any, Values]]

    def __str__(self) -> str:
        return f"{self.kind} {self.names[-1]!r}"


@dataclass(frozen=True)
class Show(Expr):
    """Put an image, a video or audio into the open turn."""

    media: Media

    def __str__(self) -> str:
        return self.media.kind


@dataclass(frozen=True)
class MediaExpr(VariableExpr[T_co]):
    """Ask a service to speak, draw or transcribe, and store what it makes under `name`."""

    name: str | None
    options: ServiceOptions

    @property
    def reads(self) -> tuple[str, ...]:
        """The variables that it reads."""
        given = (getattr(self, f.name) for f in fields(self))
        return tuple(value.name for value in given if isinstance(value, Var))


@dataclass(frozen=True)
class Speech(MediaExpr[Media]):
    """Have `text` spoken. Appends nothing."""

    _called = "speech"

    text: str | Var
    voice: Voice


@dataclass(frozen=True)
class SpokenGen(MediaExpr[Media]):
    """Let the model answer the chat aloud. Appends what it says as text."""

    _called = "speech"

    sampling: Sampling
    voice: Voice


@dataclass(frozen=True)
class Picture(MediaExpr[Media]):
    """Have `description` drawn; None for the last turn, or all text if there are no turns. Appends
    nothing."""

    _called = "picture"

    description: str | Var | None
    size: str | None


@dataclass(frozen=True)
class Transcription(MediaExpr[str]):
    """Append what is said in `audio` as text. A variable's value is anything that `audio` takes."""

    _called = "transcribe"

    audio: Media | Var
    language: str | None
    hint: str | None


@dataclass(frozen=True)
class RoleBegin(Expr):
    """Open a turn."""

    role: Role

    def __str__(self) -> str:
        return f"{self.role}_begin"


@dataclass(frozen=True)
class RoleEnd(Expr):
    """Close the open turn, which must belong to `role`."""

    role: Role

    def __str__(self) -> str:
        return f"{self.role}_end"


@dataclass(frozen=True)
class VarScopeBegin(Expr):
    """Start recording text for the variable `name`."""

    _called = "var_scope"

    name: str


@dataclass(frozen=True)
class VarScopeEnd(Expr):
    """Store the text appended since the matching begin under `name`."""

    _called = "var_scope"

    name: str


def names_made(expr: Expr) -> tuple[str, ...]:
    """The variables that an expression makes, in order."""
    match expr:
        case ExprList(items):
            return tuple(dict.fromkeys(name for item in items for name in names_made(item)))
        case Gen(name) if name is not None:
            return (name,) if expr.reasoning_name is None else (name, expr.reasoning_name)
        case Select(name) | Tool(name) | MediaExpr(name) | VarScopeEnd(name) if name is not None:
            return (name,)
        case Block(_, names):
            return names
    return ()


def names_read(expr: Expr) -> tuple[str, ...]:
    """The variables that an expression reads by their names."""
    match expr:
        case Var(name):
            return (name,)
        case AnyOrder(segments):
            return tuple(part.name for part in segments if isinstance(part, Var))
        case MediaExpr():
            return expr.reads
        case Tool(_, _, args, kwargs):
            given = (*args, *(value for _, value in kwargs))
            return tuple(value.name for value in given if isinstance(value, Var))
    return ()


def parts_of(value: object) -> tuple[Expr, ...]:
    """`value` as a flat sequence of expressions. TypeError for what a program cannot append."""
    match value:
        case ExprList(items):
            return items
        case Expr():
            return (value,)
        case str():
            return (Text(value),) if value else ()
    raise TypeError(
        f"a program appends strings and expressions (gen, select, ...), not "
        f"{type(value).__name__}: use str(...) for other values"
    )
