"""Compilation of large formats in a process that can be killed.

Owns the limits of that process. vLLM's compilers cannot be interrupted, so a format that may take
too much memory is first compiled there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgl_vllm.fsm.vllm.formats import XgrammarCall
from sgl_vllm.fsm.vllm.limits import CompilationLimitError
from sgl_vllm.fsm.worker import Worker, WorkerFailedError

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

MAX_UNSANDBOXED_CHARS = 4 << 10
"""A longer format for xgrammar is compiled in the sandbox first: a pattern of 100 kB (`(a?)` again
and again) takes 350 MB of memory a second until the engine is killed."""

SANDBOX_TIMEOUT_S = 5.0
SANDBOX_MEMORY_BYTES = 2 << 30


class SandboxedCompiler:
    """Compiles for xgrammar in a process of its own, to see whether that ends within limits.

    The process starts with the first call and takes about 300 MB. Its results are dropped.

    Args:
        tokenizer_info: xgrammar's description of the vocabulary, called when the process starts.
    """

    def __init__(self, tokenizer_info: Callable[[], TokenizerInfo]) -> None:
        self._worker = Worker(
            "sgl_vllm.fsm.vllm.xgrammar_worker",
            timeout_s=SANDBOX_TIMEOUT_S,
            memory_bytes=SANDBOX_MEMORY_BYTES,
            opening=lambda: tokenizer_info().serialize_json().encode(),
        )

    def check(self, calls: Sequence[XgrammarCall], title: str) -> None:
        """Return if compiling ends within limits, whether or not the format is valid.

        Args:
            title: what is compiled, for messages.

        Raises:
            CompilationLimitError: it does not.
        """
        try:
            self._worker.ask(json.dumps(calls).encode())
        except WorkerFailedError as error:
            raise CompilationLimitError(f"compiling the {title} {error}") from None

    def stop(self) -> None:
        self._worker.stop()
