"""Compilation for vLLM's backends in processes that can be killed.

Owns the limits of those processes, and which formats are known to keep within them. vLLM's
compilers cannot be interrupted and allocate whatever they want, so each format is compiled in such
a process before it is compiled in the engine's: a short format can cost gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.vllm.formats import XgrammarCall
from sgl_vllm.fsm.vllm.limits import (
    COMPILE_TIMEOUT_S,
    CompilationLimitError,
    CompilersBusyError,
)
from sgl_vllm.fsm.worker import Worker, WorkerFailedError, WorkerUnavailableError

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

XGRAMMAR_MEMORY_BYTES = 1 << 30
GUIDANCE_MEMORY_BYTES = 512 << 20
_MAX_VERDICTS = 10_000


class SandboxedCompiler:
    """Compiles in a process of its own, to see whether that ends within limits.

    The process starts with the first call, and its results are dropped. A format that has kept
    within the limits is not compiled there again, at the cost of one look-up.

    Args:
        module: the process's module, which calls `worker.serve`.
        memory_bytes: what it may take above what it has when it starts.
        opening: makes the first question, which tells the process the vocabulary.
    """

    def __init__(self, module: str, memory_bytes: int, opening: Callable[[], bytes]) -> None:
        self._worker = Worker(
            module, timeout_s=COMPILE_TIMEOUT_S, memory_bytes=memory_bytes, opening=opening
        )
        self._within_limits: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, question: bytes, title: str) -> None:
        """Return if compiling ends within limits, whether or not the format is valid.

        Args:
            title: what is compiled, for messages.

        Raises:
            CompilationLimitError: it does not, and the process has been killed.
            CompilersBusyError: it was not tried.
        """
        key = hashlib.blake2b(question, digest_size=16).digest()
        with self._lock:
            if key in self._within_limits:
                self._within_limits.move_to_end(key)
                return
        self._ask(question, title)
        with self._lock:
            self._within_limits[key] = None
            if len(self._within_limits) > _MAX_VERDICTS:
                self._within_limits.popitem(last=False)

    def _ask(self, question: bytes, title: str) -> bytes:
        """The process's answer. Raises as `check`."""
        try:
            return self._worker.ask(question)[1]
        except WorkerFailedError as error:
            raise CompilationLimitError(f"compiling the {title} {error}") from None
        except WorkerUnavailableError as error:
            raise CompilersBusyError(f"compiling the {title} {error}") from None

    def stop(self) -> None:
        self._worker.stop()


class XgrammarSandbox(SandboxedCompiler):
    """Compiles for xgrammar. The process takes about 60 MB and the vocabulary, and half a
    second to start (270 MB and two seconds where `xgrammar_alone` fails).

    Args:
        tokenizer_info: xgrammar's description of the vocabulary, called when the process starts.
    """

    def __init__(self, tokenizer_info: Callable[[], TokenizerInfo]) -> None:
        super().__init__(
            "sgl_vllm.fsm.vllm.xgrammar_worker",
            XGRAMMAR_MEMORY_BYTES,
            lambda: tokenizer_info().serialize_json().encode(),
        )

    def parsed(self, call: XgrammarCall, title: str) -> ParsedGrammar | None:
        """The grammar that xgrammar makes of a call's argument; None if it makes none. Raises as
        `check`."""
        packed = self._ask(json.dumps({"parse": call}).encode(), title)
        return ParsedGrammar.of(packed) if packed else None


class GuidanceSandbox(SandboxedCompiler):
    """Compiles for llguidance, up to the first bitmask. The process takes about 60 MB.

    Args:
        token_bytes: the bytes of each token, empty for special ones.
        end_token: the token that ends a text.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_token: int) -> None:
        super().__init__(
            "sgl_vllm.fsm.vllm.guidance_worker",
            GUIDANCE_MEMORY_BYTES,
            lambda: json.dumps([end_token, [t.decode("latin-1") for t in token_bytes]]).encode(),
        )
