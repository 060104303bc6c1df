"""A server's routes under `/v1/sgl/`, for commands that ask them.

Owns the requests, and one line for people about each error. Knows no vLLM, so it works from any
machine that reaches the server. Answers are the routes' JSON; docs/server.md describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any  # Any: JSON

import httpx

from sgl_vllm.commands.terminal import CommandError, reason_of

TIMEOUT_S = 30.0
PIN_TIMEOUT_S = 600.0
"""A pin may have to compute a long prompt, behind other requests."""

Json = dict[str, Any]
"""An answer's JSON object. Its values have any type: the server may be of another version."""


class ServerError(CommandError):
    """The server did not answer, or refused."""


class NoPluginError(ServerError):
    """The server answers, but without the plugin's routes."""


@dataclass(frozen=True, slots=True)
class SglServer:
    """The plugin's routes of the server at `url` (with or without a final `/v1`).

    All methods raise ServerError, or NoPluginError for a route of the plugin on stock vLLM.
    """

    url: str
    api_key: str | None = None

    def tree(self, max_nodes: int | None = None, max_text_tokens: int | None = None) -> Json:
        """`GET /v1/sgl/tree`."""
        limits = {"max_nodes": max_nodes, "max_text_tokens": max_text_tokens}
        parameters = {name: limit for name, limit in limits.items() if limit is not None}
        return self._ask("GET", "tree", params=parameters)

    def stats(self, timeout_s: float = TIMEOUT_S) -> Json:
        """`GET /v1/sgl/stats`."""
        return self._ask("GET", "stats", timeout=timeout_s)

    def why_tree_is_off(self) -> str:
        """The reason that the stats give."""
        reason = self.stats().get("parts", {}).get("radix", "on")
        return "no tree" if reason == "on" else str(reason)

    def metrics(self, timeout_s: float = TIMEOUT_S) -> str:
        """`/metrics` in Prometheus' text format. Stock vLLM has it too."""
        answer = self._send("GET", "/metrics", timeout=timeout_s)
        if answer.is_error:
            raise ServerError(f"{self.base} has no /metrics: error {answer.status_code}")
        return answer.text

    def why(self, request_id: str, cache_salt: str | None = None) -> list[Json]:
        """`GET /v1/sgl/why`: one explanation per prompt and output of a request."""
        headers = self._headers | ({"X-Cache-Salt": cache_salt} if cache_salt else {})
        answer = self._ask("GET", "why", params={"request": request_id}, headers=headers)
        return list(answer["requests"])

    def pins(self) -> list[Json]:
        """The pins of all engines."""
        return [pin for engine in self._ask("GET", "pins")["engines"] for pin in engine["pins"]]

    def pin(
        self,
        text: str,
        *,
        is_system_prompt: bool = False,
        cache_salt: str | None = None,
        model: str | None = None,
    ) -> Json:
        """`POST /v1/sgl/pin`."""
        body: Json = {"cache_salt": cache_salt, "model": model}
        if is_system_prompt:
            body["messages"] = [{"role": "system", "content": text}]
        else:
            body["prompt"] = text
        given = {name: value for name, value in body.items() if value is not None}
        return self._ask("POST", "pin", json=given, timeout=PIN_TIMEOUT_S)

    def unpin(self, pin_id: str) -> None:
        """`POST /v1/sgl/unpin`."""
        self._ask("POST", "unpin", json={"pin_id": pin_id})

    @property
    def base(self) -> str:
        """The server's address, without a path."""
        base = self.url if "://" in self.url else f"http://{self.url}"
        return base.rstrip("/").removesuffix("/sgl/tree").removesuffix("/v1")

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        options = {"timeout": TIMEOUT_S, "headers": self._headers, **options}
        try:
            return httpx.request(method, f"{self.base}{path}", **options)
        except httpx.TransportError as error:
            raise ServerError(
                f"{self.base} does not answer: {reason_of(error)}. Is a server "
                "running there? vLLM's default port is 8000"
            ) from None

    def _ask(self, method: str, route: str, **options: Any) -> Json:
        base = self.base
        answer = self._send(method, f"/v1/sgl/{route}", **options)
        if answer.status_code == 401:
            problem = "refuses this API key" if self.api_key else "requires an API key"
            raise ServerError(f"{base} {problem}: set --api-key or VLLM_API_KEY")
        message = _message_of(answer)
        if answer.status_code == 404 and message in ("Not Found", ""):
            raise NoPluginError(
                f"{base} has no /v1/sgl/{route}: was it started with --plugin sgl_vllm?"
            )
        if answer.is_error:
            raise ServerError(f"{base}: {message or f'error {answer.status_code}'}")
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ServerError(f"{base} answers, but not like a vLLM server")
        return content


def _message_of(answer: httpx.Response) -> str:
    """An error's message, in vLLM's form or FastAPI's; "" if it has neither."""
    if not answer.is_error:
        return ""
    try:
        content = answer.json()
        message = content["error"] if "error" in content else content["detail"]
        message = message["message"] if isinstance(message, dict) else message
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(str(message).split())
