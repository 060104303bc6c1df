"""SGLang's `BaseBackend`, `RuntimeEndpoint` and `Runtime`, over the backends of `sgl_vllm`.

Owns SGLang's synchronous methods.
"""

from __future__ import annotations

import atexit
import warnings
from functools import cached_property
from typing import Any  # Any: JSON, and arguments of the server

from sgl_vllm.lang import settings
from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.lang.backends.vllm import VLLM
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.prompts import TextPrompt


class ChatTemplate:
    """A template that SGLang would render chats with. Here it has a name and no effect: the server
    renders chats with the model's own template."""

    def __init__(self, name: str = "") -> None:
        self.name = name or "default"
        if name:
            warnings.warn(
                f"the chat template {name} has no effect: leave it out, because the server or "
                f"service renders chats with its own template",
                stacklevel=2,
            )


get_chat_template = get_chat_template_by_model_path = ChatTemplate


class BaseBackend(BackendHandle):
    """A backend with SGLang's methods, which are synchronous. `backend` runs the programs."""

    def __init__(
        self,
        backend: Backend | None = None,
        model_name: str = "",
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.model_name = model_name
        self.chat_template = chat_template or ChatTemplate()
        self._backend = backend

    @property
    def backend(self) -> Backend:
        """The backend of `sgl_vllm` that runs programs."""
        return super().backend if self._backend is None else self._backend

    def get_chat_template(self) -> ChatTemplate:
        """The name of a chat template, which has no effect."""
        return self.chat_template

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


# --- servers -------------------------------------------------------------------------------------


def server_info_of(backend: Backend) -> dict[str, Any]:
    """What a server runs: `model_path`, `tokenizer_path`, `context_length`, vLLM's `version`,
    `plugin`, and `internal_states`, a list with the plugin's statistics."""
    info = settings.get_server_info(backend)
    return {
        "model_path": info.model,
        "tokenizer_path": info.model,
        "context_length": info.max_model_len,
        "version": info.vllm_version,
        "plugin": info.plugin,
        "internal_states": [info.stats or {}],
    }


class RuntimeEndpoint(BaseBackend):
    """A vLLM server at `base_url`, with or without the plugin.

    `chat_template_name` has no effect. Nothing is sent before a program runs or something is read.
    """

    @suggests
    def __init__(
        self, base_url: str, api_key: str | None = None, chat_template_name: str = ""
    ) -> None:
        self._vllm = VLLM(base_url, api_key)
        super().__init__(self._vllm, chat_template=ChatTemplate(chat_template_name))
        self.base_url = self._vllm.url
        self.api_key = api_key

    @cached_property
    def model_info(self) -> dict[str, Any]:
        """`model_path`, `tokenizer_path` and `is_generation`."""
        name = settings.get_server_info(self._vllm).model
        return {"model_path": name, "tokenizer_path": name, "is_generation": True}

    def get_model_name(self) -> str:
        """The name under which the server lists its model."""
        return str(self.model_info["model_path"])

    def get_server_info(self) -> dict[str, Any]:
        """As `server_info_of`."""
        return server_info_of(self._vllm)

    def flush_cache(self) -> None:
        """Empty the server's prefix cache and wait until that is done."""
        settings.flush_cache(self._vllm)

    def cache_prefix(self, prefix_str: str) -> None:
        """Have the server compute and cache a text that prompts begin with."""
        background_loop().run_blocking(lambda: self._vllm.warm(TextPrompt(prefix_str)))


class Runtime(RuntimeEndpoint):
    """`vllm serve` with the plugin, in a process that ends with `shutdown` or with the program.

    The arguments are those of SGLang's server: `launch_server.py` has vLLM's name of each. Needs
    vLLM on this machine. Returns when the server answers; raises ServerFailed with the end of the
    server's log if it does not start.
    """

    def __init__(self, log_level: str = "error", **kwargs: Any) -> None:
        from sgl_vllm.server_process import VllmServer
        from sgl_vllm.sglang.launch_server import model_and_arguments

        model, arguments = model_and_arguments(kwargs)
        self._server = VllmServer(model, plugin=True, extra_args=arguments)
        self._server.start()
        atexit.register(self.shutdown)
        self.url = self._server.url
        super().__init__(self.url, kwargs.get("api_key"))

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The server."""
        return self

    @property
    def pid(self) -> int | None:
        """The process that runs the server. None after `shutdown`."""
        return self._server.pid if self._server.running else None

    def shutdown(self) -> None:
        """End the server."""
        atexit.unregister(self.shutdown)
        self._server.stop()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of the package transformers."""
        return get_tokenizer(self._server.model)


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    """A tokenizer of the package transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)
