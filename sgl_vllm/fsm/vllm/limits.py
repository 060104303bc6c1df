"""Limits on compilation: how long one may take, and how many run at once.

Owns these limits for compilers inside this process, which cannot be interrupted. Compilation in a
process that can be killed is in `sandbox.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

COMPILE_TIMEOUT_S = 10.0
"""A format that takes longer to compile is refused. Its compilation goes on in its thread, because
vLLM's compilers cannot be interrupted: a grammar of 1 MB keeps xgrammar busy for minutes."""

MAX_COMPILING = 4
"""Compilations at a time, including those that go on after their timeout."""

_compiling = threading.BoundedSemaphore(MAX_COMPILING)

Result = TypeVar("Result")


class CompilationLimitError(ValueError):
    """The format needs too much time or memory: it is refused, and no other backend is asked."""


def within_limits(make: Callable[[], Result], title: str) -> Result:
    """What `make` returns.

    Args:
        title: what is compiled, for messages.

    Raises:
        CompilationLimitError: it takes more than `COMPILE_TIMEOUT_S`, or `MAX_COMPILING` others do.
    """
    if not _compiling.acquire(timeout=COMPILE_TIMEOUT_S):
        raise CompilationLimitError(
            f"the {title} is not compiled: {MAX_COMPILING} others take too long"
        )
    made: Future[Result] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
        finally:
            _compiling.release()

    threading.Thread(target=work, name="sgl-vllm-compile", daemon=True).start()
    if not wait([made], COMPILE_TIMEOUT_S).done:
        raise CompilationLimitError(
            f"the {title} takes more than {COMPILE_TIMEOUT_S:g} s to compile"
        )
    return made.result()
