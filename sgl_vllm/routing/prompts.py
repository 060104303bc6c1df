"""Reads what a router needs to know of a request: its prompt, namespace, group and output limit.

Takes the bodies of OpenAI's completions and chat completions, as JSON or as vLLM's request objects.
Text stands for the prompt. The text of a chat is not what the chat template
renders, but two conversations have a common prefix exactly where their texts do. Uses neither Ray
nor vLLM, and neither logs nor keeps prompts.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple  # Any: the JSON of a request

import numpy as np
from pydantic import BaseModel

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.hints import read_hints
from sgl_vllm.protocol.standard_hints import field, with_standard_hints
from sgl_vllm.routing.prefix_hashes import Prompt

_PART_END = "\x1f"
"""Separates the parts of a message, and ends it: no message is a prefix of another."""


class RequestSummary(NamedTuple):
    """What `PrefixRouter.choose` needs to know of a request.

    Attributes:
        prompt: tokens or text; the first one, if the request has several prompts.
        namespace: which requests may share its cached tokens.
        group: the program or fork group it belongs to, if it names one.
        max_output_tokens: its own limit, if it has one.
    """

    prompt: Prompt
    namespace: CacheNamespace
    group: Hashable
    max_output_tokens: int | None


def read_request(request: object, lora: str | None, request_id: str) -> RequestSummary | None:
    """The summary of a request. None if it has no prompt, such as a request for embeddings.

    Args:
        request: a body, as a mapping or as an object with its fields.
        lora: the adapter's name, if the request is for one.
    """
    prompt = _prompt(request)
    if prompt is None:
        return None
    salt = field(request, "cache_salt")
    extra = with_standard_hints(field(request, "vllm_xargs"), request, {})
    hints = read_hints(extra, request_id)
    limit = field(request, "max_completion_tokens") or field(request, "max_tokens")
    return RequestSummary(
        prompt,
        CacheNamespace(lora, salt if isinstance(salt, str) else None),
        hints.routing_group,
        limit if isinstance(limit, int) and limit > 0 else None,
    )


def _prompt(request: object) -> Prompt | None:
    messages, prompt = field(request, "messages"), field(request, "prompt")
    if messages is None and isinstance(prompt, Sequence) and not isinstance(prompt, str):
        if prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # the first of several
        if prompt and not isinstance(prompt, str):
            return np.asarray(prompt, dtype=np.int32)
    if not messages and not isinstance(prompt, str):
        return None
    text = chat_text(messages, field(request, "tools")) if messages else str(prompt)
    return text.encode("utf-8", "surrogatepass")


def chat_text(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
    """A conversation as one text, which is a prefix of the text of any continuation."""
    texts = [_as_json(tools)] if tools else []  # chat templates put tools first
    for message in messages:
        texts.append(f"{field(message, 'role')}\n")
        texts.append(_content_text(field(message, "content")))
        others = (field(message, "tool_calls"), field(message, "name"))
        texts += [_as_json(other) for other in others if other]
        texts.append(_PART_END)
    return "".join(texts)


def _content_text(content: object) -> str:
    """A message's text. Images and other parts are represented by their JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return _as_json(content)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(text if isinstance(text, str) else _as_json(part))
    return _PART_END.join(texts)


def _as_json(value: object) -> str:
    return json.dumps(value, default=_plain, sort_keys=True)


def _plain(value: object) -> object:
    """Does not iterate over Pydantic's lazy iterators, which can be read only once."""
    return value.model_dump() if isinstance(value, BaseModel) else repr(value)
