"""SGLang's `BaseBackend`: what its backends have in common, over a backend of `sgl_vllm`."""

from __future__ import annotations

from typing import Any  # Any: JSON

from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.sglang.deprecation import deprecated
from sgl_vllm.sglang.lang.chat_template import ChatTemplate, get_chat_template


class BaseBackend(BackendHandle):
    """A backend with SGLang's methods, which are synchronous. `backend` runs the programs."""

    def __init__(self, backend: Backend | None = None, model_name: str = "") -> None:
        self.model_name = model_name
        self._backend = backend
        self._chat_template = get_chat_template("default")

    @property
    def backend(self) -> Backend:
        """The backend of `sgl_vllm` that runs programs."""
        return super().backend if self._backend is None else self._backend

    @property
    def chat_template(self) -> ChatTemplate:
        """The name of a chat template. Assigning one is deprecated and has no effect."""
        return self._chat_template

    @chat_template.setter
    def chat_template(self, template: ChatTemplate) -> None:
        deprecated("chat_template", "leave it out: the server renders chats with its own template")
        self._chat_template = template

    def get_chat_template(self) -> ChatTemplate:
        """The same as `chat_template`."""
        return self._chat_template

    def get_model_name(self) -> str:
        """The model's name."""
        return self.model_name

    def cache_prefix(self, prefix_str: str) -> None:
        """Have the server compute and cache a prefix. Does nothing for a service that offers only
        an API."""

    def flush_cache(self) -> None:
        """Empty the server's prefix cache. Does nothing for a service that offers only an API."""

    def get_server_info(self) -> dict[str, Any] | None:
        """What the server runs. None for a service that offers only an API."""
        return None

    def shutdown(self) -> None:
        """End what this backend has started, if anything."""
