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
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

_guard = Guard(
    "reading the hints of a request", "they are ignored", init_logger("vllm.sgl_vllm.hints")
)

Create = Callable[..., Awaitable[Any]]


def read_standard_hints(state: State) -> None:
    """From now on, add the standard hints of each request to its `vllm_xargs`."""
    _read_in(
        getattr(state, "openai_serving_chat", None),
        getattr(state, "openai_serving_completion", None),
        getattr(state, "openai_serving_responses", None),
        getattr(state, "anthropic_serving_messages", None),
    )


def _read_in(
    chat: OpenAIServingChat | None,
    completion: OpenAIServingCompletion | None,
    responses: OpenAIServingResponses | None,
    messages: AnthropicServingMessages | None,
) -> None:
    if chat is not None:
        wrap(chat, "create_chat_completion")(_create)
    if completion is not None:
        wrap(completion, "create_completion")(_create)
    if responses is not None:
        wrap(responses, "create_responses")(_create)
    if messages is not None:
        wrap(messages, "create_messages")(_create_messages)


async def _create(original: Create, request: Any, raw_request: Request | None = None) -> Any:
    _guard.run(_put_hints, request, request, raw_request)
    return await original(request, raw_request)


async def _create_messages(
    original: Create, request: Any, raw_request: Request | None = None
) -> Any:
    if raw_request is not None:  # the request has lost the fields that vLLM does not know
        sent = await raw_request.json()  # which FastAPI has parsed
        _guard.run(_put_hints, request, sent, raw_request)
    return await original(request, raw_request)


def _put_hints(request: Any, sent: object, raw_request: Request | None) -> None:
    """`sent` has all fields of the request."""
    if not hasattr(request, "vllm_xargs"):  # in some versions of vLLM
        return
    headers = raw_request.headers if raw_request is not None else {}
    request.vllm_xargs = with_standard_hints(request.vllm_xargs, sent, headers)
    if not getattr(request, "priority", 1):
        request.priority = agent_priority(sent)
