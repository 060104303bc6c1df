"""Backends made of others: one that passes everything on, and one with a server for each modality.

Owns which request goes to which backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    GenRequest,
    Matched,
    MediaAnswer,
    MediaRequest,
    PictureRequest,
    ScoreAnswer,
    ServerInfo,
    SpeechRequest,
    TranscriptionRequest,
)
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.usage import Usage


class Wrapper(Backend):
    """Passes all requests on to one backend, and is what that backend is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.continues_turns = backend.continues_turns
        self.tells_tokens = backend.tells_tokens
        self.ahead_budget = backend.ahead_budget
        self.scoreless_methods = backend.scoreless_methods

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def secrets(self) -> tuple[str, ...]:
        return self._backend.secrets

    async def generate(self, request: GenRequest) -> GenAnswer:
        return await self._backend.generate(request)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        return await self._backend.score(prompt, choices, unconditional=unconditional, warm=warm)

    async def media(self, request: MediaRequest) -> MediaAnswer:
        return await self._backend.media(request)

    async def warm(self, prompt: Prompt) -> Usage:
        return await self._backend.warm(prompt)

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        return await self._backend.warm_ahead(prompt)

    async def match(self, prompt: Prompt, candidates: Sequence[str]) -> list[Matched] | None:
        return await self._backend.match(prompt, candidates)

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        return await self._backend.missed_tokens(request_id)

    async def aflush_cache(self) -> None:
        await self._backend.aflush_cache()

    async def server_info(self) -> ServerInfo:
        return await self._backend.server_info()

    async def aclose(self) -> None:
        await self._backend.aclose()


class Combined(Wrapper):
    """`backend`, with others for some requests: a server of vLLM-Omni's has a single model.

    `speech` gets the `speech` of given texts, `picture` and `transcribe` theirs; None leaves them
    to `backend`. Answers that are spoken are chats, and go to `backend` as all other requests do.
    """

    @suggests
    def __init__(
        self,
        backend: Backend,
        *,
        speech: Backend | None = None,
        picture: Backend | None = None,
        transcribe: Backend | None = None,
    ) -> None:
        super().__init__(backend)
        given = {SpeechRequest: speech, PictureRequest: picture, TranscriptionRequest: transcribe}
        self._others = {kind: other for kind, other in given.items() if other is not None}

    @property
    def secrets(self) -> tuple[str, ...]:
        others = (secret for other in self._others.values() for secret in other.secrets)
        return (*super().secrets, *others)

    async def media(self, request: MediaRequest) -> MediaAnswer:
        return await self._others.get(type(request), self._backend).media(request)

    async def aclose(self) -> None:
        for backend in (self._backend, *self._others.values()):
            await backend.aclose()
