"""A backend without a server: a script determines its answers and their usage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    Generated,
    GenRequest,
    ScoreAnswer,
)
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import ChoiceTokens


def text_of(prompt: Prompt) -> str:
    """A prompt as one text."""
    if isinstance(prompt, ChatPrompt):
        return "".join(f"<{message.role}>{message.text}" for message in prompt.messages)
    return prompt.text


@dataclass
class ScriptedBackend(Backend):
    """Generates `reply(text of the prompt)`. Every character is a token, and a share of
    `cached_share` of each prompt is cached. `before` is awaited before each generation."""

    reply: Callable[[str], str] = lambda text: f"({len(text)})"
    cached_share: float = 0.5
    forced: tuple[tuple[int, int], ...] = ()
    before: Callable[[GenRequest], Awaitable[None]] | None = None
    pieces: bool = True
    asked: list[Any] = field(default_factory=list)

    tells_tokens = True

    @property
    def name(self) -> str:
        return "the scripted backend"

    @property
    def requests(self) -> list[GenRequest]:
        """The generations asked for."""
        return [one for one in self.asked if isinstance(one, GenRequest)]

    @property
    def prompts(self) -> list[str]:
        """Their prompts, as text."""
        return [text_of(one.prompt) for one in self.requests]

    def _usage(self, prompt: Prompt, completion_tokens: int) -> Usage:
        num_tokens = len(text_of(prompt))
        return Usage(num_tokens, round(num_tokens * self.cached_share), completion_tokens, 1)

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.asked.append(request)
        if self.before is not None:
            await self.before(request)
        num_texts = request.sampling.n or 1
        texts = [self.reply(text_of(request.prompt)) for _ in range(num_texts)]
        if request.watch is not None:
            for index, character in enumerate(texts[0]):
                await asyncio.sleep(0)
                if request.watch(character, index + 1):
                    texts[0] = texts[0][: index + 1]
                    break
        generated = tuple(Generated(text, "stop", (), self.forced) for text in texts)
        return GenAnswer(generated, self._usage(request.prompt, sum(map(len, texts))))

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        self.asked.append((prompt, choices))
        best = len(text_of(prompt)) % len(choices)
        scored = tuple(
            ChoiceTokens((index,), (-0.5 if index == best else -2.0,), (-1.0,))
            for index in range(len(choices))
        )
        return ScoreAnswer(scored, self._usage(prompt, 1))

    async def warm(self, prompt: Prompt) -> Usage:
        self.asked.append(prompt)
        return self._usage(prompt, 0)


def appending(*values: Any, **options: Any) -> sgl.Program[[], None]:
    """A program that appends these values."""

    def program(s: sgl.ProgramState) -> None:
        for value in values:
            s += value

    return sgl.function(program, **options)


class Meeting:
    """Two sides that go on when both are there: fails where one comes after the other."""

    def __init__(self, sides: int = 2) -> None:
        self._barrier = threading.Barrier(sides)

    def wait(self, *_: object) -> str:
        self._barrier.wait(timeout=5)
        return "met"

    async def wait_async(self, *_: object) -> None:
        await asyncio.to_thread(self.wait)


# --- ways to run ---------------------------------------------------------------------------------


def _streamed(program: Any, *args: Any, **options: Any) -> list[Any]:
    state = program.run(*args, stream=True, **options)
    state.text()
    return [state]


def _streamed_async(program: Any, *args: Any, **options: Any) -> list[Any]:
    state = asyncio.run(program.run_async(*args, stream=True, **options))
    state.text()
    return [state]


WAYS: dict[str, Callable[..., list[Any]]] = {
    "run": lambda program, *args, **options: [program.run(*args, **options)],
    "run_async": lambda program, *args, **options: [
        asyncio.run(program.run_async(*args, **options))
    ],
    "stream": _streamed,
    "stream_async": _streamed_async,
    "batch": lambda program, *args, **options: program.run_batch([args], **options),
    "generator": lambda program, *args, **options: [
        *program.run_batch([args] * 2, generator_style=True, **options)
    ],
    "batch_async": lambda program, *args, **options: asyncio.run(
        program.run_batch_async([args], **options)
    ),
}
"""A program's states, run once or twice with the same arguments."""

EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
