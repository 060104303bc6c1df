"""How loops over arrays are compiled: by numba, kept on disk where that is possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite.binding import ffi

# vLLM's CPU worker reads `__dict__["kernel"]` of all it finds in modules; numba's compiler library
# takes any attribute for a function of C, `__dict__`, too, and the worker would fail. This gives it
# an empty one. It can go when vLLM's `triton_utils.dispatcher` asks for a dict.
with contextlib.suppress(AttributeError, TypeError):
    ffi.lib._fntab.setdefault("__dict__", {})

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile with the first call. The result is cached on disk, if there is a place to write to
    (see numba's NUMBA_CACHE_DIR); otherwise every process compiles anew, some seconds long."""
    try:
        fast: Function = numba.njit(cache=True)(function)
    except RuntimeError:  # no place for the cache
        fast = numba.njit(function)
    return fast
