"""What the evaluation of a program's source is made of: places, names, stand-ins, errors.

Owns the values that the evaluator's parts pass to each other. Evaluates nothing.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from sgl_vllm.lang.tracing.deferred import Deferred

if TYPE_CHECKING:
    from sgl_vllm.lang.tracing.graph import Graph
    from sgl_vllm.lang.tracing.knowledge import Knowledge

RUN_IT = "or run the program as it is, without compiling"


class TraceError(Exception):
    """A program cannot be traced further than to one place, which the message names.

    `filename`, `line` and `expression` are that place. `graph` is what was traced before it, None
    where nothing could be. Nothing from that place on was executed.
    """

    def __init__(
        self, reason: str, advice: str, filename: str = "", line: int = 0, expression: str = ""
    ) -> None:
        place = f"{filename}:{line}: " if filename else ""
        shown = f"`{expression}`: " if expression else ""
        super().__init__(f"{place}{shown}{reason}" + (f" ({advice})" if advice else ""))
        self.reason = reason
        self.filename = filename
        self.line = line
        self.expression = expression
        self.graph: Graph | None = None


class Raised(Exception):
    """The program itself raises `error` at this place; its own try statement may catch it."""

    def __init__(self, error: BaseException, node: ast.AST, frame: Frame) -> None:
        super().__init__(str(error))
        self.error = error
        self.node = node
        self.frame = frame


@dataclass(frozen=True)
class At:
    """A place in a program."""

    evaluator: Knowledge
    node: ast.expr | ast.stmt
    frame: Frame

    @property
    def line(self) -> int:
        return self.node.lineno

    def stop(self, reason: str, advice: str = RUN_IT) -> NoReturn:
        """End the trace here."""
        self.evaluator.stop(self.node, self.frame, reason, advice)

    def decides_on(self, value: Deferred) -> NoReturn:
        """End the trace: which operations come next depends on `value`."""
        self.evaluator.decides_on(self.node, self.frame, value)

    def fail(self, error: Exception) -> NoReturn:
        """The program raises `error` here."""
        raise Raised(error, self.node, self.frame)


class Host:
    """An object of the language that stands for itself during evaluation; refuses what it lacks."""

    description = "this object"

    def attribute(self, name: str, at: At) -> Any:
        at.stop(f"{self.description} has no attribute {name!r} that can be traced")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        at.stop(f"{name}() of {self.description} cannot be traced")

    def item(self, key: Any, at: At) -> Any:
        at.stop(f"{self.description} has no items")

    def set_item(self, key: Any, value: Any, at: At) -> None:
        at.stop(f"{self.description} takes no items")

    def contains(self, key: Any, at: At) -> bool:
        at.stop(f"`in` means nothing for {self.description}")

    def append(self, value: Any, at: At) -> None:
        at.stop(f"{self.description} cannot be appended to")

    def iterate(self, at: At) -> list[Any]:
        at.stop(f"{self.description} cannot be iterated over")

    def length(self, at: At) -> int:
        at.stop(f"{self.description} has no length")

    def enter(self, at: At) -> Any:
        at.stop(f"{self.description} cannot be used in a with statement")

    def exit(self, at: At) -> None:
        raise NotImplementedError

    def deferred(self) -> Deferred:
        """What stands for it in the returned value."""
        raise TypeError(f"{self.description} cannot be returned")


@dataclass(eq=False)
class Frame:
    """The names of one function while it is followed."""

    name: str
    filename: str
    globals: Mapping[str, Any]
    locals: dict[str, Any] = field(default_factory=dict)
    outer: Frame | None = None
    closure: Mapping[str, Any] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def lookup(self, name: str) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.locals:
                return frame.locals[name]
            if name in frame.closure:
                return frame.closure[name]
            frame = frame.outer
        if name in self.globals:
            return self.globals[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NameError(f"name {name!r} is not defined")

    def owner_of(self, name: str) -> Frame | None:
        """The followed function whose local `name` a nonlocal statement means."""
        frame = self.outer
        while frame is not None and name not in frame.locals:
            frame = frame.outer
        return frame


@dataclass(frozen=True, eq=False)
class LocalFunction:
    """A def or lambda that the followed code itself made."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Frame
    defaults: tuple[Any, ...]
    keyword_defaults: Mapping[str, Any]

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(frozen=True, eq=False)
class Bound:
    """A method that was read but not called yet."""

    function: Any
    owner: Any


Hook: TypeAlias = Callable[[Any, list[Any], dict[str, Any], At], Any]
NOT_HANDLED = object()
