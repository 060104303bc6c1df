"""Runs a program of the language many times against one server, and times it from the outside.

The client is the language itself, on both arms. Its backend here differs in one way: it asks for
each generation as a stream of two parts, the first token and the rest (vLLM's `stream_interval`),
so that the time to the first token is what a user of the server sees, for one part more per
request. For a `select`, for tool calls, and with log-probabilities, it is the time to the whole
answer. The client's own processor time is reported with each round: it shares the machine with the
server, slows both arms by the same amount, and so pulls their ratio towards 1.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item
from benchmarks.traces import Call, Trace, reuse
from benchmarks.traces import Program as TracedProgram
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest, ScoreAnswer
from sgl_vllm.lang.backends.vllm_requests import ONE_TOKEN, has_media, prompt_body
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import all_answers

REST_IN_ONE_PART = 1 << 20

HASH_DIGITS = 7
"""Of an image's hash, in hexadecimal: as many as fit into a token's number."""


@dataclass(frozen=True)
class ClientOptions:
    """What the client does of itself.

    Attributes:
        parallel: a program's branches are asked for at the same time; if not, one request of a
            program after the other.
        hints: what a fork's branches, or a batch, share is sent ahead.
    """

    parallel: bool = True
    hints: bool = True


@dataclass
class _Timer:
    """When the first part of a generation arrived, in seconds of `time.perf_counter`."""

    first_token_s: float | None = None


_timer: ContextVar[_Timer | None] = ContextVar("timer", default=None)
_fields: ContextVar[Mapping[str, Any] | None] = ContextVar("fields", default=None)
"""`Workload.request_fields` of the program that asks."""


@dataclass(frozen=True)
class Asked:
    """A prompt and its reply. If the model itself `ended` it, with the token for that, then all of
    the reply was fed back, else all but its last token."""

    prompt: Prompt
    reply: str
    ended: bool


@dataclass
class Record:
    """What went through a backend: times to first tokens (s), every prompt with its reply, and how
    many requests were under way at a time, at most."""

    ttfts_s: list[float] = field(default_factory=list)
    calls: list[Asked] = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            yield
        finally:
            self.under_way -= 1


class TimedVLLM(sgl.VLLM):
    """The language's backend, which notes when the first token of each generation arrives."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.record = Record()

    @override
    async def generate(self, request: GenRequest) -> GenAnswer:
        timer, begun_s = _Timer(), time.perf_counter()
        before = _timer.set(timer)
        try:
            with self.record.request():
                answer = await super().generate(request)
        finally:
            _timer.reset(before)
        self.record.ttfts_s.append((timer.first_token_s or time.perf_counter()) - begun_s)
        self.record.calls += [
            Asked(request.prompt, generated.text, generated.finish_reason == "stop")
            for generated in answer.texts
        ]
        return answer

    @override
    async def score(self, prompt: Prompt, choices: tuple[str, ...], **options: bool) -> ScoreAnswer:
        begun_s = time.perf_counter()
        with self.record.request():
            answer = await super().score(prompt, choices, **options)
        self.record.ttfts_s.append(time.perf_counter() - begun_s)
        self.record.calls += [Asked(prompt.extended(choice), "", False) for choice in choices]
        return answer

    @override
    async def post_batched(self, body: dict[str, Any]) -> dict[str, Any]:
        """Alone: both arms are asked alike, and of each answer the first token is seen."""
        return await self.post(body)

    @override
    async def call(
        self, url: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        timer = _timer.get()
        to_stream = body is not None and url.endswith("/completions") and "logprobs" not in body
        if timer is None or body is None or not to_stream:
            return await super().call(url, body, headers)
        if fields := _fields.get():
            return _calls_as_text(await super().call(url, {**body, **fields}))
        return await self._streamed(url, body)

    @override
    async def chunks(self, url: str, body: dict[str, Any]) -> AsyncGenerator[Any]:
        timer = _timer.get()
        async with aclosing(super().chunks(url, body)) as parts:
            async for part in parts:
                if timer is not None:
                    timer.first_token_s = timer.first_token_s or time.perf_counter()
                yield part

    async def _streamed(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer as it would be without a stream."""
        body = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stream_interval": REST_IN_ONE_PART,
        }
        joined = _Joined()
        async for part in self.chunks(url, body):
            joined.add(part)
        return joined.answer(is_chat=url.endswith("/chat/completions"))

    async def as_calls(self, calls: Sequence[Asked]) -> list[Call]:
        """The calls in the server's tokens; -1 stands for one that is in no prompt."""
        made = []
        for one in calls:
            ids = await self._read(one.prompt)
            both = await self._read(one.prompt.extended(one.reply)) if one.reply else ids
            reply_ids = both[len(ids) :] if both[: len(ids)] == ids else []
            if one.ended or not reply_ids:
                reply_ids = [*reply_ids, -1]
            made.append(Call(np.array(ids, dtype=np.int32), np.array(reply_ids, dtype=np.int32)))
        return made

    async def _read(self, prompt: Prompt) -> list[int]:
        """The tokens that the model reads. Those of an image are negative: other numbers than those
        of any other image, as they stand for what it shows."""
        if not has_media(prompt):
            return await self.tokenize(prompt)
        body = {"model": await self.model_name(), **prompt_body(prompt)}
        rendered = await self.call(f"{self.url}/v1/chat/completions/render", body)
        ids = [int(token) for token in rendered["token_ids"]]
        features = rendered["features"]
        for kind, places in features["mm_placeholders"].items():
            for digest, place in zip(features["mm_hashes"][kind], places, strict=True):
                start, length = place["offset"], place["length"]
                number = int(digest[:HASH_DIGITS], 16)
                ids[start : start + length] = [-2 - number] * length
        return ids


class ByNextTokens(TimedVLLM):
    """Scores choices through stock's prefix cache: each token of a choice is scored as the next
    token of a separate prompt, with one request per choice."""

    @override
    async def compute(
        self,
        prompts: Sequence[Prompt] | Sequence[list[int]],
        endings: Sequence[list[int]] = (),
        asked: Mapping[str, Any] | None = None,
    ) -> tuple[list[tuple[float, ...]], Usage]:
        if not endings:
            return await super().compute(prompts, endings)
        pairs = zip(prompts, endings, strict=True)
        scored = await all_answers([self._next_tokens(ids, ending) for ids, ending in pairs])
        rows, costs = zip(*scored, strict=True)
        return list(rows), sum(costs, Usage())

    async def _next_tokens(
        self, ids: Prompt | list[int], ending: list[int]
    ) -> tuple[tuple[float, ...], Usage]:
        assert isinstance(ids, list)  # the workload has no media
        different = list(dict.fromkeys(ending))
        body = {
            **ONE_TOKEN,
            "model": await self.model_name(),
            "prompt": [ids[:end] for end in range(len(ids) - len(ending), len(ids))],
            "logprobs": len(different),
            "logprob_token_ids": different,
            "return_tokens_as_token_ids": True,
        }
        answer = await self.post(body)
        found = (choice["logprobs"]["top_logprobs"][0] for choice in answer["choices"])
        row = tuple(one[f"token_id:{token}"] for one, token in zip(found, ending, strict=True))
        return row, self._usage(answer)


class _BusyTime:
    """For how long at least one of the blocks under it was being carried out, in `total_s`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._num_inside = 0
        self._since_s = 0.0

    def __enter__(self) -> None:
        if not self._num_inside:
            self._since_s = time.perf_counter()
        self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self.total_s += time.perf_counter() - self._since_s


class _OfOneProgram(sgl.Backend):
    """A backend as one program sees it, which does without what the options say.

    `busy` is the time in which the program waits for the server, for whatever it asks. `fields` are
    added to its requests for text.
    """

    def __init__(
        self, backend: TimedVLLM, options: ClientOptions, fields: Mapping[str, Any] | None
    ) -> None:
        self.busy = _BusyTime()
        self._fields = fields
        self._backend = backend
        self._options = options
        self._turn: AbstractAsyncContextManager[Any]
        self._turn = nullcontext() if options.parallel else asyncio.Lock()
        self.tells_tokens = backend.tells_tokens

    @property
    def name(self) -> str:
        return self._backend.name

    async def generate(self, request: GenRequest) -> GenAnswer:
        before = _fields.set(self._fields)
        try:
            with self.busy:
                async with self._turn:
                    return await self._backend.generate(request)
        finally:
            _fields.reset(before)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        warm = warm and self._options.hints
        with self.busy:
            async with self._turn:
                return await self._backend.score(
                    prompt, choices, unconditional=unconditional, warm=warm
                )

    async def warm(self, prompt: Prompt) -> Usage:
        with self.busy:
            return await self._backend.warm(prompt) if self._options.hints else Usage()

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        with self.busy:
            return await self._backend.warm_ahead(prompt) if self._options.hints else Usage()


def _calls_as_text(answer: dict[str, Any]) -> dict[str, Any]:
    """A chat's answer with its tool calls as the message's text: NAME ARGUMENTS, one a line."""
    for choice in answer["choices"]:
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if functions:
            lines = [f"{function['name']} {function['arguments']}" for function in functions]
            message["content"] = "\n".join(lines)
    return answer


class _Joined:
    """The parts of a stream, put together."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, part: Any) -> None:
        if "error" in part:
            raise sgl.BackendError(f"the server broke off: {part['error']}")
        for choice in part["choices"]:
            index = choice["index"]
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self._texts[index] = self._texts.get(index, "") + (text or "")
            if choice["finish_reason"]:
                self._reasons[index] = choice["finish_reason"]
        self._usage = part.get("usage") or self._usage

    def answer(self, *, is_chat: bool) -> dict[str, Any]:
        if self._usage is None or self._reasons.keys() != self._texts.keys():
            raise sgl.BackendError("the server broke off in the middle of an answer")
        choices: list[dict[str, Any]] = []
        for index in sorted(self._texts):
            text = self._texts[index]
            content = {"message": {"content": text}} if is_chat else {"text": text}
            choices.append({**content, "finish_reason": self._reasons[index]})
        return {"choices": choices, "usage": self._usage}


@dataclass(frozen=True)
class Run:
    """Programs that were run: texts (with what they return), scores and latencies in the items'
    order, ttfts in none.

    `scores` are empty if the programs have no right answer.
    """

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    latencies_s: tuple[float, ...]
    ttfts_s: tuple[float, ...]
    calls: tuple[Asked, ...]
    wall_s: float
    client_cpu_s: float
    most_at_once: int


def run_programs(
    program: sgl.Program,
    items: Sequence[Item],
    url: str,
    concurrency: int,
    on_done: Callable[[], object] = lambda: None,
    *,
    options: ClientOptions | None = None,
    fields: Callable[[Item], Mapping[str, Any]] | None = None,
    score: Callable[[Item, sgl.ProgramState], float] | None = None,
    pauses: bool = False,
    backend_class: type[TimedVLLM] = TimedVLLM,
) -> Run:
    """Runs the program once per item, `concurrency` at a time, each begun as soon as one is done.

    If it `pauses`, its latency is only the time in which it waits for the server. `fields` are what
    is added to the requests of an item. `score` is given each item and
    its final state, after the time was taken. The first error ends it and is raised; what is still
    under way is left to fail with the server.
    """
    backend = backend_class(url)
    stopped = threading.Event()

    def run(item: Item) -> tuple[str, float, float | None]:
        if stopped.is_set():
            raise sgl.ProgramCancelled("another program failed")
        begun_s = time.perf_counter()
        added = fields(item) if fields else None
        asked = _OfOneProgram(backend, options or ClientOptions(), added)
        state = program.run(**item, temperature=0, backend=asked)
        text, latency_s = _written(state), time.perf_counter() - begun_s
        if pauses:
            latency_s = asked.busy.total_s
        return text, latency_s, score(item, state) if score else None

    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="program")
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    try:
        futures: list[Future[tuple[str, float, float | None]]] = [
            threads.submit(run, item) for item in items
        ]
        for future in as_completed(futures):
            future.result()
            on_done()
    except BaseException:
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    wall_s, client_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    threads.shutdown()
    texts, latencies_s, scores = zip(*(future.result() for future in futures), strict=True)
    record = backend.record
    return Run(
        texts=texts,
        scores=scores if score else (),
        latencies_s=latencies_s,
        ttfts_s=tuple(record.ttfts_s),
        calls=tuple(record.calls),
        wall_s=wall_s,
        client_cpu_s=client_cpu_s,
        most_at_once=record.most_at_once,
    )


def _written(state: sgl.ProgramState) -> str:
    """A program's text, and below it what it returns, if that is something."""
    text, returned = state.text(), state.ret_value
    return text if returned is None else f"{text}\n{returned}"


def unique_prompt_tokens(run: Run, url: str) -> int:
    """So many prompt tokens any server must compute for these calls, whatever it caches.

    What is counted once: a prefix that several calls share, and a prompt's part that is an earlier
    reply, which was computed when it was decoded (`benchmarks.traces.reuse`).
    """
    background = background_loop()
    calls = background.wait_for(background.start(TimedVLLM(url).as_calls(run.calls)))
    return reuse(Trace("run", tuple(TracedProgram((call,)) for call in calls))).must_compute_tokens
