"""How the loops over tables and tries are compiled: by numba, kept on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile with the first call. The result is cached on disk, if there is a place to write to
    (see numba's NUMBA_CACHE_DIR); otherwise every process compiles anew, some seconds long."""
    try:
        fast: Function = numba.njit(cache=True)(function)
    except RuntimeError:  # no place for the cache
        fast = numba.njit(function)
    return fast
