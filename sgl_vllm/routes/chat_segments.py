"""The segments that a chat marks, moved to where they are in its rendered prompt.

Owns the moment: when vLLM has rendered the chat, and before it makes a request of it. Does not own
how (`protocol/segments.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any  # Any: arguments and messages of vLLM's

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from sgl_vllm.protocol.request_keys import SEGMENTS
from sgl_vllm.protocol.segments import intervals_of, marks_in
from sgl_vllm.vllm_api.patching import wrap


def attach(renderer: OnlineRenderer) -> None:
    """Move the marks of each chat that `renderer` renders from now on."""

    @wrap(renderer, "render_chat")
    async def render_chat(
        original: Callable[..., Awaitable[Any]],
        request: ChatCompletionRequest,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = await original(request, *args, **kwargs)
        extra = request.vllm_xargs
        if not extra or SEGMENTS not in extra or not isinstance(result, tuple):
            return result
        try:
            intervals = intervals_of(extra[SEGMENTS])
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        contents = [
            message.get("content") if isinstance(message, dict) else None
            for message in request.messages
        ]
        _, (engine_input,) = result
        marks = marks_in(engine_input.get("prompt"), contents, intervals)
        request.vllm_xargs = {**extra, SEGMENTS: marks}
        return result
