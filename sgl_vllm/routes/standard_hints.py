"""Reads the hints that clients send without knowing of the plugin, before vLLM drops them.

Owns where requests still have all their fields and headers. Does not own what is read from them
(`protocol/standard_hints.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any  # Any: vLLM's request and serving objects

from fastapi import Request
from starlette.datastructures import State
from vllm.logger import init_logger

from sgl_vllm.degrade import Guard
from sgl_vllm.protocol.standard_hints import agent_priority, with_standard_hints
from sgl_vllm.routes.tenants import current_headers
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

_guard = Guard(
    "reading the hints of a request", "they are ignored", init_logger("vllm.sgl_vllm.hints")
)

Create = Callable[..., Awaitable[Any]]


def read_standard_hints(state: State) -> None:
    """From now on, add the standard hints of each request to the Responses API and the Messages API
    to its `vllm_xargs`. `incoming.py` does so for chats and completions."""
    _read_in(
        getattr(state, "openai_serving_responses", None),
        getattr(state, "anthropic_serving_messages", None),
    )


def _read_in(
    responses: OpenAIServingResponses | None, messages: AnthropicServingMessages | None
) -> None:
    if responses is not None:
        wrap(responses, "create_responses")(_create)
    if messages is not None:
        wrap(messages, "create_messages")(_create_messages)


async def _create(original: Create, request: Any, raw_request: Request | None = None) -> Any:
    read_hints(request, request)
    return await original(request, raw_request)


async def _create_messages(
    original: Create, request: Any, raw_request: Request | None = None
) -> Any:
    if raw_request is not None:  # the request has lost the fields that vLLM does not know
        read_hints(request, await raw_request.json())  # which FastAPI has parsed
    return await original(request, raw_request)


def read_hints(request: Any, sent: object) -> None:
    """Add the hints of a request, and of its HTTP headers. `sent` has all fields of the request."""
    _guard.run(_put_hints, request, sent)


def _put_hints(request: Any, sent: object) -> None:
    if not hasattr(request, "vllm_xargs"):  # in some versions of vLLM
        return
    own, headers = request.vllm_xargs, current_headers.get()
    request.vllm_xargs = with_standard_hints(own, sent, headers if headers is not None else {})
    if not getattr(request, "priority", 1):
        request.priority = agent_priority(sent)
