"""SGLang's `RuntimeEndpoint`, a server at a URL, and `Runtime`, a server that the program starts.

Owns SGLang's synchronous methods. Requests are those of `sgl_vllm.lang.backends.vllm`.
"""

from __future__ import annotations

import atexit
import ssl
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: JSON, and SGLang's server arguments

from sgl_vllm.lang import settings
from sgl_vllm.lang.backends.base import Backend, TextPrompt
from sgl_vllm.lang.backends.vllm import VLLM
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.sglang.deprecation import deprecated
from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.chat_template import get_chat_template

if TYPE_CHECKING:
    from openai import AsyncOpenAI


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


class _VLLM(VLLM):
    """A vLLM server whose certificate the CA file `verify` certifies."""

    def __init__(self, base_url: str, api_key: str | None, verify: str) -> None:
        super().__init__(base_url, api_key)
        self._verify = verify

    def new_client(self) -> AsyncOpenAI:
        import openai

        context = ssl.create_default_context(cafile=self._verify)
        return (
            super()
            .new_client()
            .with_options(http_client=openai.DefaultAsyncHttpxClient(verify=context))
        )


class RuntimeEndpoint(BaseBackend):
    """A vLLM server at `base_url`, with or without the plugin.

    `verify` is a file of certificates to check the server's with. `chat_template_name` is
    deprecated and has no effect. Nothing is sent before a program runs or something is read.
    """

    @suggests
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        self._vllm = VLLM(base_url, api_key) if verify is None else _VLLM(base_url, api_key, verify)
        super().__init__(self._vllm)
        self.base_url = self._vllm.url
        self.api_key = api_key
        self.verify = verify
        if chat_template_name is not None:
            deprecated(
                "chat_template_name", "leave it out: the server renders chats with its own template"
            )
            self._chat_template = get_chat_template(chat_template_name)

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
        background = background_loop()
        background.wait_for(background.start(self._vllm.warm(TextPrompt(prefix_str))))


class Runtime(BaseBackend):
    """`vllm serve` with the plugin, in a process that ends with `shutdown` or with the program.

    The arguments are those of SGLang's server: `server_args.py` has vLLM's name of each. Needs
    vLLM on this machine. Returns when the server answers; raises ServerFailed with the end of the
    server's log if it does not start.
    """

    def __init__(self, log_level: str = "error", **kwargs: Any) -> None:
        from sgl_vllm.server_process import VllmServer
        from sgl_vllm.sglang.server_args import model_and_arguments

        model, arguments = model_and_arguments(kwargs)
        self._server = VllmServer(model, plugin=True, extra_args=arguments)
        self._server.start()
        atexit.register(self.shutdown)
        self.url = self._server.url
        self.endpoint = RuntimeEndpoint(self.url, kwargs.get("api_key"))
        super().__init__(self.endpoint.backend)

    @property
    def pid(self) -> int | None:
        """The process that runs the server. None after `shutdown`."""
        return self._server.pid if self._server.running else None

    def shutdown(self) -> None:
        """End the server."""
        atexit.unregister(self.shutdown)
        self._server.stop()

    def get_model_name(self) -> str:
        """The name of the model."""
        return self.endpoint.get_model_name()

    def get_server_info(self) -> dict[str, Any]:
        """As `RuntimeEndpoint.get_server_info`."""
        return self.endpoint.get_server_info()

    def flush_cache(self) -> None:
        """As `RuntimeEndpoint.flush_cache`."""
        self.endpoint.flush_cache()

    def cache_prefix(self, prefix_str: str) -> None:
        """As `RuntimeEndpoint.cache_prefix`."""
        self.endpoint.cache_prefix(prefix_str)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of the package transformers."""
        from sgl_vllm.sglang.srt.utils.hf_transformers_utils import get_tokenizer

        return get_tokenizer(self._server.model)
