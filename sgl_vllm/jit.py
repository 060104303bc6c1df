"""Compiles loops over arrays with numba, and caches the result on disk where possible.

Without numba, the parts that run these loops are off (`fsm/vllm/part.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar  # Any: functions of numba's have no types

try:
    import numba
    from llvmlite.binding import ffi
except (ImportError, OSError):  # not installed, or not for this NumPy
    numba = ffi = None
HAS_NUMBA = numba is not None

# vLLM's CPU worker reads `__dict__["kernel"]` of every object in its modules. numba's compiler
# library treats any attribute as a C function, `__dict__` included, so the worker would fail. This
# gives it an empty dictionary. Remove it when vLLM's `triton_utils.dispatcher` asks for a dict.
with contextlib.suppress(AttributeError, TypeError):
    ffi.lib._fntab.setdefault("__dict__", {})

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED: list[Any] = []
"""The functions that numba compiles, as its dispatchers, which have no type that mypy can read."""


def compiled(function: Function, *, nogil: bool = False) -> Function:
    """Decorator: compiles a function at its first call.

    The result is cached on disk if a folder is writable (see numba's NUMBA_CACHE_DIR). Otherwise
    every process compiles again, which takes some seconds.

    Args:
        nogil: other threads run meanwhile. For what may take long; after it, the thread waits for
            the interpreter, which can be longer than a short function takes.
    """
    if not HAS_NUMBA:
        return function
    try:
        fast: Function = numba.njit(cache=True, nogil=nogil)(function)
    except RuntimeError:  # no writable folder for the cache
        fast = numba.njit(nogil=nogil)(function)
    COMPILED.append(fast)
    return fast
