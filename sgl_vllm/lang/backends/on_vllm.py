"""What the backends for a vLLM server and for an engine in this process have in common.

Owns the request for a generation, `select` by prompt log-probabilities, and reading the plugin's
report. How tokens and log-probabilities are obtained is up to the backends: over HTTP in `vllm.py`,
from the engine itself in `engine.py`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeGuard, TypeVar  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.base import Backend, Json
from sgl_vllm.lang.backends.openai_api import sampling_body
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest, ScoreAnswer
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.request_keys import (
    AHEAD,
    APPROXIMATE,
    REPORT,
    REUSE,
    SCORE_FROM,
    SEGMENTS,
)

T = TypeVar("T")

ONE_TOKEN: Json = {"max_tokens": 1, "temperature": 0.0}
"""The fewest tokens that vLLM generates: for requests that are about their prompt."""


def has_media(prompt: Prompt) -> TypeGuard[ChatPrompt]:
    """Whether it is a chat with images, videos or audio."""
    return isinstance(prompt, ChatPrompt) and bool(prompt.media)


class OnVLLM(Backend):
    """A model that vLLM runs. It reports tokens, so the scores of choices are exact."""

    tells_tokens = True

    async def generate(self, request: GenRequest) -> GenAnswer:
        """At temperature 0, all `n` texts are equal. vLLM then refuses more than one, so that one
        is generated."""
        sampling = request.sampling
        if sampling.temperature != 0 or sampling.n is None:
            return await self.generate_texts(request)
        one = replace(request, sampling=replace(sampling, n=1))
        answer = await self.generate_texts(one)
        return replace(answer, texts=answer.texts * sampling.n)

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        return (await self.compute([prompt], asked={AHEAD: 1}))[1]

    @abstractmethod
    async def generate_texts(self, request: GenRequest) -> GenAnswer:
        """`generate` as vLLM does it: `n` is 1 at temperature 0."""

    @abstractmethod
    async def has_plugin(self) -> bool:
        """Whether the plugin is active."""

    @abstractmethod
    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `generate` reads it."""

    @abstractmethod
    async def begin_ids(self) -> list[int]:
        """What the tokenizer puts before any text: one token, or nothing."""

    @abstractmethod
    async def compute(
        self,
        prompts: Sequence[Prompt] | Sequence[list[int]],
        endings: Sequence[list[int]] = (),
        asked: Json | None = None,
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """Have the model read prompts, or their tokens, so that they are cached.

        Returns the cost, and the log-probabilities of the last tokens of each prompt, which are
        `endings`, if there are any. `asked` is for the plugin: with `SCORE_FROM`, what is before
        that token of a prompt may be read from the cache.
        """

    async def warm_ids(self, ids: list[int]) -> Usage:
        """Compute and cache these tokens."""
        return (await self.compute([ids]))[1]

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """The log-probabilities of the tokens from `start` on in each sequence, as one call."""
        endings = [ids[start:] for ids in sequences]
        return await self.compute(sequences, endings, {SCORE_FROM: start})

    @abstractmethod
    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], list[Usage]] | None:
        """The log-probability of each of `tokens` right after `ids`, and what each request cost.

        None where the model's own log-probabilities are not available, only those after
        restrictions on sampling.
        """

    async def ids_of_empty_prompt(self) -> list[int]:
        """The tokens to send for a prompt without text, which vLLM rejects."""
        ids = await self.begin_ids()
        if not ids:
            raise BackendError(
                "the prompt is empty, and the model's tokenizer has no beginning-of-text token to "
                "start from: put some text before this"
            )
        return ids

    async def tokenized(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[Usage]]:
        """The tokens of each prompt, and the cost of obtaining them."""
        return await scoring.all_answers([self.tokenize(prompt) for prompt in prompts]), []

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        continued = [prompt.extended(choice) for choice in choices]
        (prefix_ids, *full_ids), costs = await self.tokenized([prompt, *continued])
        model: scoring.Model[Usage] = self
        if has_media(prompt):
            chats = [prompt.extended(choice) for choice in choices]
            model = _MediaScoring(self, prompt, chats, prefix_ids, full_ids)
            warm = True  # and learn how many tokens the model reads
        try:
            scored = await scoring.score(
                model,
                prefix_ids,
                full_ids,
                unconditional=unconditional,
                warm=warm and await self.has_plugin(),
            )
        except scoring.NothingToScoreError as error:
            raise BackendError(str(error)) from None
        return ScoreAnswer(scored.choices, sum((*costs, *scored.costs), Usage()))

    def media_io_kwargs(self, prompt: ChatPrompt) -> Json:
        """How to read the media of a prompt, in the form of vLLM's option. Empty for defaults."""
        num_frames = {m.num_frames for m in prompt.media if m.num_frames is not None}
        if len(num_frames) > 1:
            raise UnsupportedError(
                self.name,
                "videos with different num_frames in one prompt",
                "use the same num_frames for all",
            )
        return {"video": {"num_frames": num_frames.pop()}} if num_frames else {}


class _MediaScoring:
    """The model as `sgl_vllm.protocol.scoring` asks it, for one prompt with media and its choices.

    The tokens of such a prompt do not say what its media show, so it cannot be sent as tokens: each
    choice is sent as a chat that ends with it.

    Args:
        backend: runs the model.
        prompt: what comes before the choices.
        continued: the prompt with each choice.
        prefix_ids: tokens of the prompt. An image may be one token of them, or as many as the model
            reads.
        full_ids: tokens of `continued`, in the same form.
    """

    def __init__(
        self,
        backend: OnVLLM,
        prompt: ChatPrompt,
        continued: Sequence[ChatPrompt],
        prefix_ids: Sequence[int],
        full_ids: Sequence[list[int]],
    ) -> None:
        self._backend = backend
        self._prompt = prompt
        self._continued = continued
        self._num_prefix = len(prefix_ids)
        self._full_ids = list(full_ids)
        self._num_read: int | None = None

    async def begin_ids(self) -> list[int]:
        return await self._backend.begin_ids()

    async def warm_ids(self, ids: list[int]) -> Usage:
        """Compute and cache the whole prompt, of which `ids` is a prefix."""
        cost = (await self._backend.compute([self._prompt]))[1]
        self._num_read = cost.prompt_tokens
        return cost

    async def next_token_logprobs(self, ids: list[int], tokens: list[int]) -> None:
        """Not asked one by one: each would be a chat as well."""

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        if sequences != self._full_ids:  # the choices alone, which have no media
            return await self._backend.prompt_logprobs(sequences, start)
        asked: Json = {}
        if self._num_read is not None:  # where scoring starts in the tokens that the model reads
            asked[SCORE_FROM] = self._num_read - (self._num_prefix - start)
        endings = [ids[start:] for ids in sequences]
        return await self._backend.compute(self._continued, endings, asked)


def missed_by_cause(explanation: Json) -> dict[str, int]:
    """Tokens by cause, of an explanation as the plugin gives it (`radix/misses.py`)."""
    missed: Counter[str] = Counter()
    for one in explanation["causes"]:
        missed[str(one["cause"])] += int(one["end"]) - int(one["start"])
    return dict(missed)


def generation_body(request: GenRequest, *, chat: bool) -> Json:
    """A generation in the form of vLLM's API, but for its prompt. `chat` chooses between the
    options of the chat route and those of completions."""
    sampling = request.sampling
    body = sampling_body(sampling, chat=chat)
    asked: Json = {}  # of the plugin: a report of forced text, and to reuse segments
    if (constraint := request.constraint) is not None:
        body["structured_outputs"] = {constraint.kind.vllm_key: constraint.value}
        if (sampling.n or 1) == 1:  # vLLM reports on one text only
            asked[REPORT] = 1
    if request.prompt.reusable and not has_media(request.prompt):
        asked[SEGMENTS] = [mark for interval in request.prompt.reusable for mark in interval]
        asked[REUSE] = APPROXIMATE
    if asked:
        body["vllm_xargs"] = asked
    if sampling.prompt_logprobs_from is not None:
        body["prompt_logprobs"] = sampling.top_logprobs_num
    return body


def with_report(texts: list[Generated], usage: Usage, kv_transfer_params: Json | None) -> Usage:
    """Add the plugin's report to the first text. Returns the usage with its forced tokens, and with
    the tokens of reused segments."""
    answers = kv_transfer_params or {}
    if reused := answers.get(REUSE):
        usage = replace(usage, reused_tokens=int(reused["reused_tokens"]))
    report = answers.get(REPORT)
    if not report:
        return usage
    texts[0] = _with_forced(texts[0], report["forced_bytes"])
    return replace(usage, forced_tokens=int(report["forced_tokens"]))


def _with_forced(generated: Generated, forced_bytes: list[list[int]]) -> Generated:
    """The text with its forced intervals converted from bytes to characters. A stop text may have
    cut them."""
    data = generated.text.encode()

    def num_chars(num_bytes: int) -> int:
        return len(data[:num_bytes].decode(errors="ignore"))

    intervals = ((num_chars(start), num_chars(end)) for start, end in forced_bytes)
    return replace(generated, forced=tuple((a, b) for a, b in intervals if a < b))


class Once(Generic[T]):
    """An answer that is requested when it is first needed, on one event loop.

    Callers that come while it is being requested share the answer, or the failure. After a
    failure, the next caller asks again.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[T] | None = None

    async def answer(self) -> T:
        if self._task is None or (self._task.done() and not _succeeded(self._task)):
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_succeeded)  # marks a failure as seen for asyncio
        return await asyncio.shield(self._task)

    @property
    def was_asked(self) -> bool:
        """Whether there is an answer, or one may still arrive."""
        return self._task is not None


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None
