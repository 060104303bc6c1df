"""Reads the hints that clients send without knowing of the plugin, before vLLM drops them.

Owns where requests are seen with all their fields and headers. Does not own what is read of them
(`protocol/standard_hints.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
    """Put the standard hints of each request where ours would be, from now on."""
    if (chat := getattr(state, "openai_serving_chat", None)) is not None:
        _read_hints_of_chats(chat)
    if (completion := getattr(state, "openai_serving_completion", None)) is not None:
        _read_hints_of_completions(completion)
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        _read_hints_of_responses(responses)
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        _read_hints_of_messages(messages)


def _read_hints_of_chats(serving: OpenAIServingChat) -> None:
    @wrap(serving, "create_chat_completion")
    async def create_chat(
        original: Create, request: Any, raw_request: Request | None = None
    ) -> Any:
        _read(request, request, raw_request)
        return await original(request, raw_request)


def _read_hints_of_completions(serving: OpenAIServingCompletion) -> None:
    @wrap(serving, "create_completion")
    async def create_completion(
        original: Create, request: Any, raw_request: Request | None = None
    ) -> Any:
        _read(request, request, raw_request)
        return await original(request, raw_request)


def _read_hints_of_responses(serving: OpenAIServingResponses) -> None:
    @wrap(serving, "create_responses")
    async def create_responses(
        original: Create, request: Any, raw_request: Request | None = None
    ) -> Any:
        _read(request, request, raw_request)
        return await original(request, raw_request)


def _read_hints_of_messages(serving: AnthropicServingMessages) -> None:
    @wrap(serving, "create_messages")
    async def create_messages(
        original: Create, request: Any, raw_request: Request | None = None
    ) -> Any:
        if raw_request is not None:  # the request has lost the fields that vLLM does not know
            _read(request, await raw_request.json(), raw_request)  # which FastAPI has parsed
        return await original(request, raw_request)


def _read(request: Any, sent: Any, raw_request: Request | None) -> None:
    """`sent`: what has all fields of the request."""
    _guard.run(_put_hints, request, sent, raw_request.headers if raw_request is not None else {})


def _put_hints(request: Any, sent: Any, headers: Mapping[str, str]) -> None:
    if not hasattr(request, "vllm_xargs"):  # in some versions of vLLM
        return
    request.vllm_xargs = with_standard_hints(request.vllm_xargs, sent, headers)
    if not getattr(request, "priority", 1):
        request.priority = agent_priority(sent)
