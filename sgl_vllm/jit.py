"""Compiles loops over arrays with numba, and caches the result on disk where possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar  # Any: functions of numba's have no types

import numba
from llvmlite.binding import ffi

# vLLM's CPU worker reads `__dict__["kernel"]` of every object in its modules. numba's compiler
# library treats any attribute as a C function, `__dict__` included, so the worker would fail. This
# gives it an empty dictionary. Remove it when vLLM's `triton_utils.dispatcher` asks for a dict.
with contextlib.suppress(AttributeError, TypeError):
    ffi.lib._fntab.setdefault("__dict__", {})

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED: list[Any] = []
"""The functions that numba compiles, as its dispatchers, which have no type that mypy can read."""


def compiled(function: Function) -> Function:
    """Decorator: compiles a function at its first call. While it runs, other threads run, too.

    The result is cached on disk if a folder is writable (see numba's NUMBA_CACHE_DIR). Otherwise
    every process compiles again, which takes some seconds.
    """
    try:
        fast: Function = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no writable folder for the cache
        fast = numba.njit(nogil=True)(function)
    COMPILED.append(fast)
    return fast
