"""What a router sees of a request: its prompt, who may share its cache, and what it asks for.

Reads the bodies of OpenAI's completions and chat completions, as JSON or as vLLM's request objects.
A text stands for the prompt where there is no tokenizer. It is no chat template's text, but begins
alike exactly where two conversations do, which is all that routing asks. Knows neither Ray nor
vLLM; nothing here is logged or kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from sgl_vllm.protocol.hints import hints_in
from sgl_vllm.routing.prefix_hashes import Namespace, Units

Renderer = Callable[[Mapping[str, Any]], Sequence[int]]
"""The tokens of a body, as the engine will have them. It may raise: then the text is used."""

_PARTS_END = "\x1f"
"""Between the parts of a message, and at its end: a message is never the beginning of another."""


class Asked(NamedTuple):
    """What `PrefixRouter.choose` takes of one request.

    Attributes:
        units: the prompt, tokens or text; of several prompts in one request, the first.
        namespace: who may share its cached tokens.
        group: the program or fork group that it belongs to, if it says so.
        max_output_tokens: its own limit, if it has one.
    """

    units: Units
    namespace: Namespace
    group: Hashable
    max_output_tokens: int | None


def read_request(
    request: Any, lora: str | None, request_id: str, render: Renderer | None = None
) -> Asked | None:
    """What is asked; None for a request without a prompt, such as one to tokenize or embed.

    Args:
        request: a body, as a mapping or as an object with its fields.
        lora: the adapter's name, if the request is for one.
        render: gives a body's tokens, where the router has a tokenizer. Some ms for a long prompt.
    """
    body = request if isinstance(request, Mapping) else _Fields(request)
    units = _units(body, render)
    if units is None:
        return None
    salt = body.get("cache_salt")
    hints = hints_in(body.get("vllm_xargs"), request_id)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return Asked(
        units,
        Namespace(lora, salt if isinstance(salt, str) else None),
        hints.together,
        limit if isinstance(limit, int) and limit > 0 else None,
    )


def _units(body: Mapping[str, Any], render: Renderer | None) -> Units | None:
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None and isinstance(prompt, Sequence) and not isinstance(prompt, str):
        if prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # the first of several
        if prompt and not isinstance(prompt, str):
            return np.asarray(prompt, dtype=np.int32)
    if not messages and not isinstance(prompt, str):
        return None
    if render is not None:
        return np.asarray(render(body), dtype=np.int32)
    text = chat_text(messages, body.get("tools")) if messages else str(prompt)
    return text.encode("utf-8", "surrogatepass")


def chat_text(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
    """A conversation as one text. One that goes on with further messages begins with it."""
    written = [_written(tools)] if tools else []  # templates put them first
    for message in messages:
        fields = message if isinstance(message, Mapping) else _Fields(message)
        written.append(f"{fields.get('role')}\n")
        written.append(_content_text(fields.get("content")))
        written += [_written(fields[key]) for key in ("tool_calls", "name") if fields.get(key)]
        written.append(_PARTS_END)
    return "".join(written)


def _content_text(content: Any) -> str:
    """Texts are themselves; an image or the like is told from others by what it says of itself."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return _written(content)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(text if isinstance(text, str) else _written(part))
    return _PARTS_END.join(texts)


def _written(value: Any) -> str:
    return json.dumps(value, default=_as_json, sort_keys=True)


def _as_json(value: Any) -> Any:
    """Pydantic's lazy iterators are left alone: who reads one takes it from the engine."""
    return value.model_dump() if isinstance(value, BaseModel) else repr(value)


class _Fields(Mapping[str, Any]):
    """An object's fields as a mapping; what it has not is None."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self._of, name, None)

    def __iter__(self) -> Any:
        return iter(vars(self._of))

    def __len__(self) -> int:
        return len(vars(self._of))
