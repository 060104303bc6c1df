"""Where vLLM compiles grammars: new formats in its threads, known ones at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any  # Any: whatever is submitted

from vllm.v1.request import Request
from vllm.v1.structured_output.request import StructuredOutputRequest

from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.formats import with_whitespace
from sgl_vllm.protocol.request_keys import COMPACT, WHITESPACE, WHITESPACES


class GrammarExecutor(Executor):
    """Runs vLLM's compilations.

    A known format is answered in the calling thread: another thread would have to wait until the
    engine's loop releases the interpreter, which it does every 5 ms.

    Args:
        whitespace: the server's default for JSON.
    """

    def __init__(self, threads: Executor, backend: SglBackend, whitespace: str) -> None:
        self._threads = threads
        self._backend = backend
        self._whitespace = whitespace

    # Any: the signature of `Executor.submit`.
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        structured = args[0].structured_output_request
        _name_whitespace(args[0], structured, self._whitespace)
        if not self._backend.knows(*structured.structured_output_key):
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _name_whitespace(request: Request, structured: StructuredOutputRequest, default: str) -> None:
    """Add the request's whitespace, or the server's default, to the key of its format."""
    params = request.sampling_params
    if params is None or params.structured_outputs is None:
        return
    asked = (params.extra_args or {}).get(WHITESPACE)
    if asked not in [*WHITESPACES]:  # a list cannot be looked up
        is_compact = params.structured_outputs.disable_any_whitespace
        asked = COMPACT if is_compact else "" if default == "stock" else default
    kind, spec = structured.structured_output_key
    structured.structured_output_key = kind, with_whitespace(spec, asked)
