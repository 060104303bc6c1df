"""What compiling a format may cost the engine: time, memory, and how many at once.

Owns the limits and what is done beyond them. Which backend compiles a format is `backend.py`'s to
say. Stock's compilers cannot be interrupted: what may take too much memory is first tried in a
process of its own (`worker.py`), and what takes too long nobody waits for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from sgl_vllm.fsm.worker import GaveUpError, Worker

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

MAX_UNTRIED_CHARS = 4 << 10
"""A longer format for xgrammar is first compiled in a process that may die of it: a pattern of
100 kB (`(a?)` again and again) takes 350 MB of memory a second until the engine is killed. What is
shorter may take as long, but not much memory."""

TRIAL_TIMEOUT_S = 5.0
TRIAL_MEMORY_BYTES = 2 << 30

COMPILE_TIMEOUT_S = 10.0
"""A format that takes longer to compile is refused. Stock's compilers cannot be interrupted: a
grammar of 1 MB keeps xgrammar busy for minutes, and whoever else needs a grammar waits."""

MAX_COMPILING = 4
"""So many compilations at a time, given-up ones that still run included."""

_compiling = threading.BoundedSemaphore(MAX_COMPILING)


class CompilingTakesTooLongError(ValueError):
    """A format is refused; no other backend is asked for it."""


def named(request_type: StructuredOutputOptions) -> str:
    """As messages name a format."""
    return f"the {request_type.name.lower()}"


Made = TypeVar("Made")


def within_limits(make: Callable[[], Made], request_type: StructuredOutputOptions) -> Made:
    """What `make` returns, unless that takes too long: then it goes on, but nobody waits for it.

    Raises CompilingTakesTooLongError, and whatever `make` raises.
    """
    what = named(request_type)
    if not _compiling.acquire(timeout=COMPILE_TIMEOUT_S):
        raise CompilingTakesTooLongError(
            f"{what} is not compiled: {MAX_COMPILING} others take too long"
        )
    made: Future[Made] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
        finally:
            _compiling.release()

    threading.Thread(target=work, name="sgl-vllm-compile", daemon=True).start()
    if not wait([made], COMPILE_TIMEOUT_S).done:
        raise CompilingTakesTooLongError(
            f"{what} takes more than {COMPILE_TIMEOUT_S:g} s to compile"
        )
    return made.result()


class SandboxedCompiler:
    """Compiles for xgrammar in a process of its own, which starts with the first that is asked for
    and takes some 300 MB. Nothing of it is kept but that it has come to an end.

    Args:
        tokenizer_info: gives xgrammar's description of the vocabulary, when the process starts.
    """

    def __init__(self, tokenizer_info: Callable[[], TokenizerInfo]) -> None:
        self._worker = Worker(
            "sgl_vllm.fsm.vllm.xgrammar_worker",
            timeout_s=TRIAL_TIMEOUT_S,
            memory_bytes=TRIAL_MEMORY_BYTES,
            opening=lambda: tokenizer_info().serialize_json().encode(),
        )

    def compile(
        self, request_type: StructuredOutputOptions, spec: str, *, any_whitespace: bool
    ) -> None:
        """Returns if stock may compile this, whether or not it is right. Raises
        CompilingTakesTooLongError."""
        calls = _calls_of_xgrammar(request_type, spec, any_whitespace)
        try:
            self._worker.ask(json.dumps(calls).encode())
        except GaveUpError as error:
            raise CompilingTakesTooLongError(f"compiling {named(request_type)} {error}") from None

    def stop(self) -> None:
        self._worker.stop()


def _calls_of_xgrammar(
    request_type: StructuredOutputOptions, spec: str, any_whitespace: bool
) -> list[tuple[str, str, dict[str, Any]]]:
    """What stock asks of xgrammar's compiler."""
    of_schema = {
        "any_whitespace": any_whitespace,
        "separators": None if any_whitespace else (",", ":"),
    }
    if request_type == StructuredOutputOptions.JSON:
        return [("compile_json_schema", spec, of_schema)]
    if request_type == StructuredOutputOptions.REGEX:
        return [("compile_regex", spec, {})]
    if request_type == StructuredOutputOptions.GRAMMAR:
        is_lark = grammar_is_likely_lark(spec)
        return [("compile_lark" if is_lark else "compile_grammar", spec, {})]
    tag = json.loads(spec)
    if "structures" not in tag:
        return [("compile_structural_tag", spec, {})]
    schemas = [json.dumps(one["schema"]) for one in tag["structures"]]
    return [("compile_json_schema", schema, {}) for schema in schemas]
