"""Settings of the whole process: the default backend, and calls that go to it.

Owns `global_config`, which has SGLang's name and those of its fields that apply here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.lang.backends.requests import ServerInfo
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.loop import background_loop


@dataclass
class GlobalConfig:
    """Settings of the whole process.

    - `default_backend` is used by every run without a `backend` of its own.
    - `enable_precache_with_tracing`: `run_batch` first sends what its prompts have in common.
    - `enable_prefill_during_tools`: while a tool runs, the server computes the prompt up to it.
    - `enable_hints_of_what_follows`: a generation's request says which tool runs next, if that is
      known when it is sent.
    """

    default_backend: Backend | BackendHandle | None = None
    enable_precache_with_tracing: bool = True
    enable_prefill_during_tools: bool = True
    enable_hints_of_what_follows: bool = True


global_config = GlobalConfig()


def set_default_backend(backend: Backend | BackendHandle) -> None:
    """Use `backend` for every run without a `backend` of its own."""
    _checked(backend)
    global_config.default_backend = backend


def chosen_backend(backend: Backend | BackendHandle | None) -> Backend:
    """`backend`, or the default one. BackendError if there is neither, and TypeError for another
    object."""
    chosen = backend or global_config.default_backend
    if chosen is None:
        raise BackendError(
            "no backend: call set_default_backend(VLLM('http://127.0.0.1:8000')) first, or pass "
            "backend=..."
        )
    return _checked(chosen)


def _checked(backend: object) -> Backend:
    if isinstance(backend, BackendHandle):
        return backend.backend
    if not isinstance(backend, Backend):
        is_url = isinstance(backend, str) and backend.startswith("http")
        example = f"VLLM({backend!r})" if is_url else "VLLM('http://127.0.0.1:8000')"
        raise TypeError(f"a backend is an object such as {example}, not {backend!r}")
    return backend


def flush_cache(backend: Backend | None = None) -> None:
    """Empty the server's prefix cache and wait until that is done.

    `backend` is by default that of `set_default_backend`. Raises UnsupportedError on a server
    without the plugin, and BackendError if the server does not answer. In async code, use
    ``await asyncio.to_thread(sgl.flush_cache)``.
    """
    chosen_backend(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> ServerInfo:
    """What the server runs: its model and versions, and the plugin's statistics if it has it.

    `backend` is by default that of `set_default_backend`. Raises BackendError if the server does
    not answer, and UnsupportedError for a hosted service such as OpenAI's.
    """
    return background_loop().run_blocking(chosen_backend(backend).server_info)
