"""Prompts as backends receive them: text, or the turns of a chat.

Owns the messages of a chat. What a program writes into its prompt is in `transcript.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias  # Any: JSON

from sgl_vllm.lang.ir import Role
from sgl_vllm.lang.media import Media

Content: TypeAlias = "str | tuple[str | Media, ...]"


@dataclass(frozen=True)
class Message:
    """One turn of a chat: text, or texts and media in order."""

    role: Role
    content: Content

    def as_dict(self) -> dict[str, Any]:
        """The message in the form of OpenAI's chat API, which is also vLLM's."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": [_part(part) for part in self.content]}

    @property
    def text(self) -> str:
        """The text without media."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    def extended(self, suffix: str) -> Message:
        """The message with more text at its end."""
        if isinstance(self.content, str):
            return replace(self, content=self.content + suffix)
        if self.content and isinstance(self.content[-1], str):
            return replace(self, content=(*self.content[:-1], self.content[-1] + suffix))
        return replace(self, content=(*self.content, suffix))


AUDIO_FORMATS = {"audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg"}
"""The names that the parts of messages have for formats of audio."""


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.kind == "audio" and part.media_type in AUDIO_FORMATS:
        sent = {"data": part.url.partition(",")[2], "format": AUDIO_FORMATS[part.media_type]}
        return {"type": "input_audio", "input_audio": sent}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.url}}


@dataclass(frozen=True)
class TextPrompt:
    """A prompt without roles: the text itself.

    `reusable` are the intervals of characters of segments whose KV the server may reuse from
    another place, which is not exact.
    """

    text: str
    reusable: tuple[tuple[int, int], ...] = ()

    def extended(self, suffix: str) -> TextPrompt:
        return replace(self, text=self.text + suffix)


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt with roles, which the server renders with its chat template.

    `ending` says how the rendered prompt ends: "closed" after the end of the last turn, "generate"
    with the opening of an empty assistant turn, "continue" inside the last turn, after its text.
    `reusable` counts through the texts of all messages. With media, servers reuse nothing.
    """

    messages: tuple[Message, ...]
    ending: Literal["closed", "generate", "continue"]
    reusable: tuple[tuple[int, int], ...] = ()

    def extended(self, suffix: str) -> ChatPrompt:
        """The prompt with `suffix` added to its open turn."""
        if self.ending == "generate":
            messages = (*self.messages, Message("assistant", suffix))
            return replace(self, messages=messages, ending="continue")
        assert self.ending == "continue", "a closed turn cannot be extended"
        *before, last = self.messages
        return replace(self, messages=(*before, last.extended(suffix)))

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and audio, in order."""
        contents = (m.content for m in self.messages if not isinstance(m.content, str))
        return tuple(part for content in contents for part in content if isinstance(part, Media))


Prompt: TypeAlias = TextPrompt | ChatPrompt
