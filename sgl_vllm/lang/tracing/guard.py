"""Keeps a traced program from having effects: ends the trace before it calls what may have one.

Owns the list of what a program may call while it is traced. Watches its calls with
`sys.setprofile`, in the trace's thread alone. It sees neither what a program assigns (a global, an
item or attribute of an object from outside) nor the call of a type that is written in C.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.errors import RUN_IT, captured_by, is_programs, package_of, stop
from sgl_vllm.lang.tracing.standin import holds_standin, refuse_text

_AS_TOOL = "call it with sgl.tool(...), or before the run"

_MODULES = {
    *("builtins", "re", "_sre", "string", "_string", "textwrap", "html", "json", "_json"),
    *("math", "cmath", "statistics", "_statistics", "fractions", "decimal", "_decimal", "operator"),
    *("_operator", "itertools", "functools", "_functools", "collections", "_collections"),
    *("bisect", "_bisect", "heapq", "_heapq", "binascii", "base64", "struct", "_struct", "zlib"),
    *("unicodedata", "datetime", "_datetime", "types", "typing", "enum", "abc", "_abc", "copy"),
    *("dataclasses", "contextlib", "inspect", "asyncio"),
}
"""Modules whose functions and types change nothing."""

_UNSAFE = {
    *("builtins.print", "builtins.input", "builtins.exec", "builtins.eval", "builtins.compile"),
    *("builtins.setattr", "builtins.delattr", "builtins.breakpoint", "builtins.__import__"),
    *("datetime.now", "datetime.today", "datetime.utcnow"),
}
"""What they have besides, and what differs from call to call."""

_MUTATORS = frozenset(
    name
    for kind, reading in ((list, tuple), (dict, types.MappingProxyType), (set, frozenset))
    for name in {*dir(kind)} - {*dir(reading)}
)
"""Methods that change a list, dict or set."""

_LIBRARY = ("typing", "contextlib", "functools", "enum", "abc", "dataclasses", "types")
"""Modules of Python whose functions pass values on without looking at them."""


class _Guard:
    """The profile function of one trace."""

    def __init__(self, function: Callable[..., object], max_s: float) -> None:
        self._deadline_s = time.monotonic() + max_s
        self._max_s = max_s
        self._function = function

    def __call__(self, frame: types.FrameType, event: str, called: Value) -> None:
        if event not in ("call", "c_call"):
            return
        if time.monotonic() > self._deadline_s:
            self._deadline_s = float("inf")
            stop(f"tracing takes more than {self._max_s:g} s")
        if str(frame.f_globals.get("__name__")).startswith("sgl_vllm."):
            return
        if event == "call":
            self._entered(frame)
        elif not _is_of_language(frame):
            self._check(called, frame)

    def _check(self, called: Value, frame: types.FrameType) -> None:
        """Of a function written in C."""
        owner, name = called.__self__, called.__name__
        if owner is None or inspect.ismodule(owner):
            home = called.__module__ or getattr(owner, "__name__", "builtins")
        else:
            kind = owner if isinstance(owner, type) else type(owner)
            home = kind.__module__
            if isinstance(owner, str) and name not in ("join", "format") and holds_standin(owner):
                refuse_text(f"{name}()")
            if name in _MUTATORS and self._is_foreign(owner, frame):
                stop(f"{name}() changes a {kind.__name__} from outside of the program", _AS_TOOL)
        if name != "fspath" and (home not in _MODULES or f"{home}.{name}" in _UNSAFE):
            stop(f"calling {name} may have side effects", _AS_TOOL)

    def _is_foreign(self, owner: object, frame: types.FrameType) -> bool:
        """Whether `owner` was there before the trace, as far as names tell. Not the caches of
        Python's own modules, such as `re`."""
        is_pythons = frame.f_globals.get("__name__") in _MODULES
        known = () if is_pythons else frame.f_globals.values()
        return any(owner is value for value in (*captured_by(self._function), *known))

    def _entered(self, frame: types.FrameType) -> None:
        """Stop in a function written in Python that is not to be traced."""
        caller, code = frame.f_back, frame.f_code
        if caller is None or is_programs(frame) or not is_programs(caller):
            return
        home = str(frame.f_globals.get("__name__", ""))
        if code.co_name == "_find_and_load":
            stop("importing may have side effects", "import it at the top of the file")
        if home.startswith("asyncio"):
            stop(f"{code.co_name}() needs an event loop", f"await one after the other, or {RUN_IT}")
        if not home.startswith(("sgl_vllm", *_LIBRARY)):
            given = frame.f_locals.values()
            if any(map(holds_standin, given)):
                stop(
                    f"{code.co_name}() is given a value that only a run knows",
                    f"call it in sgl.tool(...), or {RUN_IT}",
                )


def _is_of_language(frame: types.FrameType | None) -> bool:
    """Whether not the program made this call, but the language, or the garbage collector, which
    may run at any moment."""
    while frame is not None and not is_programs(frame):
        if package_of(frame.f_globals) == "sgl_vllm" or frame.f_code.co_name == "__del__":
            return True
        if any(getattr(one, "__code__", None) is frame.f_code for one in gc.callbacks):
            return True
        frame = frame.f_back
    return False


@contextmanager
def guarded(function: Callable[..., object], max_s: float) -> Iterator[None]:
    """While the ``with`` block calls `function`, end the trace before an effect, and after `max_s`
    seconds."""
    before = sys.getprofile()
    sys.setprofile(_Guard(function, max_s))
    try:
        yield
    finally:
        sys.setprofile(before)
