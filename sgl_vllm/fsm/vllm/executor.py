"""Where vLLM compiles grammars: new formats in its threads, known ones at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any  # Any: whatever is submitted

from sgl_vllm.fsm.vllm.backend import SglBackend


class GrammarExecutor(Executor):
    """Runs vLLM's compilations.

    A known format is answered in the calling thread: another thread would have to wait until the
    engine's loop releases the interpreter, which it does every 5 ms.
    """

    def __init__(self, threads: Executor, backend: SglBackend) -> None:
        self._threads = threads
        self._backend = backend

    # Any: the signature of `Executor.submit`.
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        structured = getattr(args[0], "structured_output_request", None) if args else None
        if structured is None or not self._backend.knows(*structured.structured_output_key):
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
