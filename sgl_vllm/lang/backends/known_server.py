"""What is known about a vLLM server over one connection.

Owns the questions that are asked once, when their answer is first needed, and the batcher.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.batching import Batcher, BatchRoute
from sgl_vllm.lang.backends.clients import Connection
from sgl_vllm.lang.backends.once import Once
from sgl_vllm.lang.backends.openai_api import OpenAIBackend
from sgl_vllm.lang.errors import BackendError


@dataclass(frozen=True)
class Model:
    """A model that a server lists."""

    name: str
    max_model_len: int | None


class KnownServer:
    """A vLLM server at `url`, as far as is known."""

    def __init__(
        self,
        backend: OpenAIBackend,
        connection: Connection,
        url: str,
        model: str | None,
        begin_ids: Callable[[], Coroutine[Any, Any, list[int]]],
    ) -> None:
        """Args:
        model: the name to look for; None for the first that the server lists.
        begin_ids: asks what the tokenizer puts before any text: one token, or nothing.
        """
        self._backend = backend
        self._url = url
        self._name = model
        self.connection = connection
        with connection.client() as client:
            route = BatchRoute(client, timeout_s=backend.timeout_s)
        self.batcher = Batcher(backend.post, route.open, route.abort, retry=backend.max_retries > 0)
        self.model = Once(self._ask_model)
        self.plugin = Once(self._ask_plugin)
        self.begin_ids = Once(begin_ids)
        self.has_match = True  # the route
        self.cached_block_size = 1  # `Usage.cached_block_size` without a salt

    async def _ask_model(self) -> Model:
        answer = await self._backend.call(f"{self._url}/v1/models")
        with self._backend.reading():
            models = [Model(str(m["id"]), m.get("max_model_len")) for m in answer["data"]]
            return next((m for m in models if m.name == self._name), models[0])

    async def _ask_plugin(self) -> bool:
        try:
            stats = await self._backend.call(f"{self._url}/v1/sgl/stats")
        except BackendError as error:
            if error.status is None or error.status in (401, 408, 429) or error.status >= 500:
                raise
            return False  # 404, or the answer of a gateway that does not forward this route
        with self._backend.reading():
            self.cached_block_size = int(stats.get("cached_block_size", 1))
        return True
