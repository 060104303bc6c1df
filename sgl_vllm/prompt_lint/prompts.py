"""Prompts as the linter sees them, read from a log of requests.

Owns the log's format and which part of a body comes where in a prompt. Chat templates differ, but
nearly all write the tools first and the messages in their order after them; so does this module,
with the role in front of each message. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias  # Any: JSON

Json: TypeAlias = Mapping[str, Any]

TOOLS = "tools."
"""What the places of tools begin with; the name of the function follows."""

APPENDED = "appended"
"""The place of a value that a fix moved to the end of a prompt."""


class LogError(ValueError):
    """A log that cannot be read. The message names the line."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt that a client wrote in one go.

    Attributes:
        place: where it stands in the body: `tools.NAME`, `messages[0].system`, `prompt`.
        text: as it goes into the prompt.
    """

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request.

    Attributes:
        parts: in the order in which a server reads them.
        model: prompts of different models share nothing.
        salt: the request's `cache_salt`; prompts with different ones share nothing.
    """

    parts: tuple[Part, ...]
    model: str = ""
    salt: str = ""

    def with_parts(self, parts: Iterable[Part]) -> Prompt:
        return replace(self, parts=tuple(parts))


def read_log(lines: Iterable[str]) -> list[Prompt]:
    """The prompts of a log of one JSON object per line, in their order.

    An object is the body of a request to `/v1/chat/completions` or `/v1/completions`, or has one
    under `body` or `request`, as lines of OpenAI's batch files do. Empty lines are skipped. A body
    whose `prompt` is a list of texts is one prompt for each of them.

    Raises:
        LogError: a line is not such an object.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise LogError(f"line {number} is not JSON: {error}") from None
        try:
            prompts += _prompts_of(body)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LogError(
                f"line {number} is not the body of a completion or chat request: {error}"
            ) from None
    return prompts


def _prompts_of(body: Any) -> list[Prompt]:
    if not isinstance(body, dict):
        raise TypeError("it is not a JSON object")
    for wrapper in ("body", "request"):
        if isinstance(body.get(wrapper), dict):
            body = body[wrapper]
    model, salt = str(body.get("model") or ""), str(body.get("cache_salt") or "")
    if "messages" in body:
        return [Prompt(tuple(_chat_parts(body)), model, salt)]
    if "prompt" not in body:
        raise ValueError("it has neither messages nor a prompt")
    texts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its prompt is not text")
    return [Prompt((Part("prompt", text),), model, salt) for text in texts]


def _chat_parts(body: Json) -> Iterable[Part]:
    for tool in body.get("tools") or ():
        name = tool.get("function", tool).get("name", "")
        yield Part(f"{TOOLS}{name}", json.dumps(tool, ensure_ascii=False))
    for number, message in enumerate(body["messages"]):
        role = message["role"]
        yield Part(f"messages[{number}].{role}", f"{role}\n{_content(message)}\n")


def _content(message: Json) -> str:
    """A message's text, with its tool calls, and its images and sounds as what names them."""
    content = message.get("content") or ""
    pieces = [content] if isinstance(content, str) else [_item(item) for item in content]
    if message.get("tool_calls"):
        pieces.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(pieces)


def _item(item: Json) -> str:
    text = item.get("text")
    return text if isinstance(text, str) else json.dumps(item, ensure_ascii=False, sort_keys=True)
