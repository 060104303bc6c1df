"""`TraceError`, and the place in a program that it names.

Owns which code counts as the program's own: that of its package, or of its script.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar  # Any: the graph, whose module needs this one

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

RUN_IT = "run the program without compiling it"

home: ContextVar[str | None] = ContextVar("sgl_vllm_traced_home", default=None)
"""The package of the program that is being traced; None outside of a trace."""


def is_tracing() -> bool:
    """Whether a program is being traced."""
    return home.get() is not None


def unwatched(function: CallableT) -> CallableT:
    """Let the guard of the trace rest while `function` runs, which is the language's own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        guard = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(guard)

    return call  # type: ignore[return-value]


def captured_by(function: object) -> list[Any]:
    """The variables of the functions around a function that it uses, as far as they have values."""
    values: list[Any] = []
    for cell in (function.__closure__ or ()) if inspect.isfunction(function) else ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def package_of(names: Mapping[str, Any]) -> str:
    """The package of a function or a frame, by its globals."""
    return str(names.get("__name__", "")).partition(".")[0]


class TraceError(Exception):
    """A program cannot be traced beyond one place, which the message names: `filename`, `line` and
    `expression`. `graph` is what was traced before it, or None if nothing could be."""

    def __init__(
        self, reason: str, advice: str, filename: str = "", line: int = 0, expression: str = ""
    ) -> None:
        place = f"{filename}:{line}: " if filename else ""
        shown = f"`{expression}`: " if expression else ""
        super().__init__(f"{place}{shown}{reason}" + (f" ({advice})" if advice else ""))
        self.reason, self.filename, self.line = reason, filename, line
        self.expression = expression
        self.graph: Any = None


class Stop(BaseException):
    """Ends the function of a program that is being traced. Not an Exception: programs catch those.
    `error` is None where nothing is wrong, and the rest of the program does not matter."""

    def __init__(self, error: TraceError | None) -> None:
        self.error = error


def stop(reason: str, advice: str = RUN_IT) -> NoReturn:
    """End the trace here. Outside of a trace, where a stand-in was kept, raise the TraceError."""
    error = TraceError(reason, advice, *_place_of(program_frame(), None))
    if not is_tracing():
        raise error
    raise Stop(error)


def failure(error: Exception) -> TraceError:
    """The end of a trace in which the program itself raised `error`."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if is_programs(trace.tb_frame):
            found = trace
        trace = trace.tb_next
    place = _place_of(found.tb_frame, found.tb_lasti) if found else ("", 0, "")
    reason, advice = f"the program raises {type(error).__name__}: {error}", ""
    if isinstance(error, TypeError | AttributeError) and "StandIn" in str(error):
        advice = (
            f"append the value, write it in an f-string, or give it to sgl.tool(...), or {RUN_IT}"
        )
    return TraceError(reason, advice, *place)


def is_programs(frame: types.FrameType) -> bool:
    """Whether the code of a frame is the program's own, and was not made by a library."""
    package = package_of(frame.f_globals)
    is_made = frame.f_code.co_filename == "<string>" and package != "__main__"
    return package == home.get() and not is_made


def program_frame() -> types.FrameType | None:
    """The innermost running frame of the program's own code."""
    frame = inspect.currentframe()
    while frame is not None and not is_programs(frame):
        frame = frame.f_back
    return frame


def _place_of(frame: types.FrameType | None, lasti: int | None) -> tuple[str, int, str]:
    """File, line and expression of the instruction that a frame is at."""
    if frame is None:
        return "", 0, ""
    code, index = frame.f_code, (frame.f_lasti if lasti is None else lasti) // 2
    line, end, begin_column, end_column = next(
        itertools.islice(code.co_positions(), index, None), (None, None, None, None)
    )
    if line is None or end is None or begin_column is None or end_column is None:
        return code.co_filename, line or frame.f_lineno, ""
    text = linecache.getline(code.co_filename, line).encode()[begin_column:]
    source = (text[: end_column - begin_column] if end == line else text).decode().strip()
    return code.co_filename, line, source if len(source) <= 80 else source[:77] + "..."
