"""The interface between programs and backends: the `Backend` class, and backends made of others.

Knows no protocol: HTTP is in `vllm.py` and the other backends. All calls run on the language's own
event loop.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any, TypeAlias, TypeVar, cast  # Any: JSON

from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    GenRequest,
    MediaAnswer,
    MediaRequest,
    PictureRequest,
    ScoreAnswer,
    ServerInfo,
    SpeechRequest,
    TranscriptionRequest,
)
from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.errors import UnsupportedError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.planning import OrderMemory, SegmentId
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.speculation import AheadBudget
from sgl_vllm.lang.usage import Usage

Method = TypeVar("Method", bound=Callable[..., Any])

logger = logging.getLogger("sgl_vllm")

Json: TypeAlias = dict[str, Any]
"""A JSON object. Values of answers are unchecked: read them where a wrong type or a missing key
becomes a BackendError (see `ServiceBackend.reading`)."""


def without_none(**options: object) -> Json:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


program_id: ContextVar[str] = ContextVar("sgl_vllm_program_id", default="")
"""The program run that a call belongs to. Set while its operations run, for backends to send."""

branch_name: ContextVar[str] = ContextVar("sgl_vllm_branch_name", default="")
"""The branch of that run that a call belongs to, such as ``fork[1]``. Empty for the root."""


class Backend(ABC):
    """A model behind some protocol. Every method ends in bounded time or raises BackendError.

    A feature that a backend does not have raises UnsupportedError, which names both. If there is
    another way to the same answer, the backend uses that and logs a warning once.
    """

    continues_turns: bool = True
    """Whether the model can continue an unfinished last turn of a chat."""

    tells_tokens: bool = False
    """Whether `watch` receives the number of tokens so far with each piece of text. Set to False
    during a run if that turns out to be wrong."""

    @cached_property
    def ahead_budget(self) -> AheadBudget:
        """How far API speculative execution has paid with this backend."""
        return AheadBudget()

    scoreless_methods: tuple[ChoicesMethod, ...] | None = None
    """The choices methods allowed for a backend that chooses without scores; None for a backend
    that has scores, which support every method."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name in messages, with its address."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no record may contain, such as API keys."""
        return ()

    @abstractmethod
    async def generate(self, request: GenRequest) -> GenAnswer:
        """Generate `request.sampling.n` texts after the prompt."""

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        """Score each of `choices` as the continuation of `prompt`, or choose one without scores.

        `unconditional` requests the log-probabilities without the prompt as well. `warm` says that
        the server has not seen the prompt, so that sending it ahead may save time.
        """
        raise UnsupportedError(self.name, "select", "use gen with a regex or a list in the prompt")

    async def media(self, request: MediaRequest) -> MediaAnswer:
        """Speak, answer aloud, draw or transcribe."""
        raise UnsupportedError(
            self.name, request.feature, f"use a backend for a server that has {request.route}"
        )

    async def warm(self, prompt: Prompt) -> Usage:
        """Have the server compute and cache `prompt` (the frontend hint). An answer is dropped.

        Does nothing for a backend without a cache to fill.
        """
        return Usage()

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        """`warm`, for a prompt that is not needed yet. May be canceled when it is.

        A server with the plugin computes it when no other request waits.
        """
        return await self.warm(prompt)

    @cached_property
    def orders(self) -> OrderMemory[SegmentId]:
        """The orders of segments that were sent to it, for `any_order`."""
        return OrderMemory()

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        """The prompt tokens of an earlier generation that were not read from the server's cache, by
        cause (`protocol/causes.py`). Empty if the backend cannot know, or the server has forgotten.
        """
        return {}

    def flush_cache(self) -> None:
        """Empty the server's prefix cache and wait until that is done."""
        background_loop().run_blocking(self.aflush_cache)

    async def aflush_cache(self) -> None:
        """What `flush_cache` runs on the language's own event loop."""
        raise UnsupportedError(self.name, "flush_cache", "use a vLLM server of your own")

    async def server_info(self) -> ServerInfo:
        """Ask the server for its model and versions."""
        raise UnsupportedError(self.name, "get_server_info", "use a vLLM server of your own")

    async def aclose(self) -> None:  # noqa: B027  # a backend without connections needs no override
        """Close connections. The backend can be used again afterwards."""


class BackendHandle:
    """Stands for a backend wherever a program takes one, and has other methods than it, such as
    those of SGLang's backends (`sgl_vllm.sglang`)."""

    @property
    def backend(self) -> Backend:
        """The backend that runs programs."""
        raise NotImplementedError(f"{type(self).__name__} has no backend")


def _passed_on(method: Method) -> Method:
    """The method of a wrapper that calls the same one of its backend."""

    @wraps(method, updated=())  # not that it is abstract
    def call(self: Wrapper, *args: object, **options: object) -> object:
        return getattr(self._backend, method.__name__)(*args, **options)

    return cast("Method", call)


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

    generate = _passed_on(Backend.generate)
    score = _passed_on(Backend.score)
    media = _passed_on(Backend.media)
    warm = _passed_on(Backend.warm)
    warm_ahead = _passed_on(Backend.warm_ahead)
    missed_tokens = _passed_on(Backend.missed_tokens)
    aflush_cache = _passed_on(Backend.aflush_cache)
    server_info = _passed_on(Backend.server_info)
    aclose = _passed_on(Backend.aclose)


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
