"""The types that the parts of the evaluator share: places, names, hosts, `TraceError`.

Evaluates nothing.
"""

from __future__ import annotations

import ast
import types
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.deferred import Argument, Deferred, Reading

if TYPE_CHECKING:
    from sgl_vllm.lang.tracing.graph import Graph

Args: TypeAlias = list[Value]
Kwargs: TypeAlias = dict[str, Value]
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

RUN_IT = "run the program without compiling it"


class TraceError(Exception):
    """A program cannot be traced beyond one place, which the message names.

    `filename`, `line` and `expression` are that place. `graph` is what was traced before it, or
    None if nothing could be. Nothing from that place on was executed. `is_decision` says that the
    program decides there on a value that only a run knows.
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
        self.is_decision = False


@dataclass(eq=False)
class Frame:
    """A function while its source is evaluated. Assignments go to the first map of `names`."""

    name: str
    filename: str
    names: ChainMap[str, Value] = field(repr=False)

    def inner(self, name: str) -> Frame:
        """The frame of a function, or of a comprehension, that this one contains."""
        return Frame(name, self.filename, self.names.new_child())


@dataclass(frozen=True)
class At:
    """A place in a program."""

    node: ast.expr | ast.stmt
    frame: Frame

    def stop(self, reason: str, advice: str = RUN_IT) -> NoReturn:
        """End the trace here."""
        raise self._error(reason, advice)

    def fail(self, error: Exception) -> NoReturn:
        """End the trace, because the program itself raises `error` here."""
        raise self._error(f"the program raises {type(error).__name__}: {error}", "") from error

    def decides_on(self, value: Deferred) -> NoReturn:
        """End the trace, because the next operations depend on `value`."""
        arguments = sorted(leaf.name for leaf in value.leaves if isinstance(leaf, Argument))
        advice = RUN_IT
        if arguments and not any(isinstance(leaf, Reading) for leaf in value.leaves):
            given = ", ".join(f"{name}=..." for name in arguments)
            advice = f"pass it when compiling, compile({given}), or {RUN_IT}"
        error = self._error(f"the program decides on {value.why()}", advice)
        error.is_decision = True
        raise error

    def _error(self, reason: str, advice: str) -> TraceError:
        source = " ".join(ast.unparse(self.node).split())
        shown = source if len(source) <= 80 else source[:77] + "..."
        return TraceError(reason, advice, self.frame.filename, self.node.lineno, shown)


class Host:
    """An object of the language, such as the prompt, that stands for itself during evaluation.

    Refuses, with a TraceError, whatever a subclass does not support.
    """

    description = "this object"

    def attribute(self, name: str, at: At) -> Value:
        at.stop(f"attribute {name!r} of {self.description} cannot be traced")

    def call(self, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        at.stop(f"{name}() of {self.description} cannot be traced")

    def item(self, key: Value, at: At) -> Value:
        at.stop(f"{self.description} has no items")

    def set_item(self, key: Value, value: Value, at: At) -> None:
        at.stop(f"{self.description} takes no items")

    def contains(self, key: Value, at: At) -> bool:
        at.stop(f"{self.description} does not support `in`")

    def append(self, value: Value, at: At) -> None:
        at.stop(f"{self.description} cannot be appended to")

    def iterate(self, at: At) -> list[Value]:
        at.stop(f"{self.description} cannot be iterated over")

    def length(self, at: At) -> int:
        at.stop(f"{self.description} has no length")

    def enter(self, at: At) -> Value:
        at.stop(f"{self.description} cannot be used in a with statement")

    def exit(self, at: At) -> None:
        """Leave the `with` block that `enter` began."""

    def as_value(self, at: At) -> Deferred:
        """Its stand-in among deferred values, such as in the returned value."""
        at.stop(f"{self.description} is no value", "read a variable with s['name']")


@dataclass(frozen=True, eq=False)
class LocalFunction:
    """A `def` or `lambda` of the evaluated code itself."""

    node: FunctionNode
    frame: Frame
    defaults: tuple[Value, ...]
    keyword_defaults: Mapping[str, Value]

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name


Function: TypeAlias = LocalFunction | types.FunctionType
