"""Records runs to a file, and replays them without a server: for tests, and to inspect a run.

Owns the two backends and the matching of requests to recorded ones. The file format is in
`record.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

from sgl_vllm.lang.backends.base import Backend, Json, Wrapper, branch_name
from sgl_vllm.lang.backends.record import (
    FORMAT,
    Exchange,
    compact,
    describe_unknown,
    end_of_prompt,
    error_written,
    gen_request,
    keys_of,
    load,
    media_request,
    read_record,
    request_key,
    score_request,
    warm_request,
    without_keys,
)
from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    Generated,
    GenRequest,
    MediaAnswer,
    MediaRequest,
    ScoreAnswer,
    ServerInfo,
    SpeechRequest,
    SpokenRequest,
    Watch,
)
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.usage import Usage

T = TypeVar("T")

Pieces: TypeAlias = list[tuple[str, "int | None"]]
"""Of a text that was streamed, each with the number of tokens so far."""


class Recorder(Wrapper):
    """`backend`, with every exchange written to the file at `path`, which is overwritten.

    Each line is handed to the operating system as soon as its exchange ends, so that a crash loses
    nothing before it. Errors and canceled requests are recorded, too. Use it as
    ``with sgl.Recorder(backend, path) as recorder:``, or close it with `close`.
    """

    @suggests
    def __init__(self, backend: Backend, path: str | os.PathLike[str]) -> None:
        super().__init__(backend)
        self._keys = keys_of(backend)
        self._lock = threading.Lock()
        self._repeats: dict[tuple[str, str], int] = defaultdict(int)
        self.path = Path(path)
        self._file: IO[str] | None = self.path.open(
            "w", encoding="utf-8", errors="surrogatepass", newline="\n"
        )
        head = {
            "sgl_vllm_record": FORMAT,
            "backend": backend.name,
            "continues_turns": backend.continues_turns,
            "tells_tokens": backend.tells_tokens,
        }
        self._write(without_keys(head, self._keys))

    async def generate(self, request: GenRequest) -> GenAnswer:
        pieces: Pieces = []
        asked = request
        if (watch := request.watch) is not None:

            def keep(piece: str, num_tokens: int | None) -> bool:
                pieces.append((piece, num_tokens))
                return watch(piece, num_tokens)

            asked = replace(request, watch=keep)
        return await self._exchange(
            "generate", gen_request(request), lambda: self._backend.generate(asked), pieces
        )

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        return await self._exchange(
            "score",
            score_request(prompt, choices, unconditional=unconditional),
            lambda: self._backend.score(prompt, choices, unconditional=unconditional, warm=warm),
        )

    async def media(self, request: MediaRequest) -> MediaAnswer:
        return await self._exchange(
            "media", media_request(request), lambda: self._backend.media(request)
        )

    async def warm(self, prompt: Prompt) -> Usage:
        return await self._exchange(
            "warm", warm_request(prompt), lambda: self._backend.warm(prompt)
        )

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        return await self._exchange(
            "warm", warm_request(prompt), lambda: self._backend.warm_ahead(prompt)
        )

    async def server_info(self) -> ServerInfo:
        return await self._exchange("server_info", {}, self._backend.server_info)

    def close(self) -> None:
        """Close the file. `backend` stays open. Later requests to the recorder are errors."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    async def _exchange(
        self,
        call: str,
        request: Json,
        ask: Callable[[], Awaitable[T]],
        pieces: Pieces | None = None,
    ) -> T:
        if self._file is None:
            raise BackendError(f"the record {self.path} is closed: nothing more can be recorded")
        branch = branch_name.get()
        key = request_key(call, request)
        with self._lock:
            repeat = self._repeats[key, branch]
            self._repeats[key, branch] += 1
        line: Json = {"call": call, "request": request}
        if branch:
            line["branch"] = branch
        if repeat:
            line["repeat"] = repeat

        def write(**outcome: object) -> None:
            streamed = {"pieces": pieces} if pieces and "cancelled" not in outcome else {}
            self._write({**line, **streamed, **outcome})

        try:
            answer = await ask()
        except BackendError as error:
            write(error=without_keys(error_written(error), self._keys))
            raise
        except asyncio.CancelledError:
            write(cancelled=True)
            raise
        written = compact(answer)
        write(answer=without_keys(written, self._keys) if call == "server_info" else written)
        return answer

    def _write(self, line: Json) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._file.flush()


class Replay(Backend):
    """Answers requests from the record at `path`, without a server.

    Equal requests get their answers in the recorded order, separately for each branch, so that
    branches and programs that run in parallel get their own answers again. A request that comes
    more often than recorded gets its last answer again if nothing in it is sampled (temperature 0,
    or a select); otherwise it is an error. A request that was not recorded raises a BackendError
    that says how it differs from the most similar one. A prefix hint that was not recorded costs
    nothing.

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a record. A last
    line that a crash cut off is ignored.
    """

    @suggests
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        head, self._exchanges = read_record(self.path)
        self._recorded_name = str(head.get("backend"))
        self.continues_turns = bool(head.get("continues_turns", True))
        self.tells_tokens = bool(head.get("tells_tokens", False))
        self._lock = threading.Lock()
        self._by_key: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in sorted(self._exchanges, key=lambda e: (e.branch, e.repeat)):
            self._by_key[request_key(exchange.call, exchange.request)].append(exchange)

    @property
    def name(self) -> str:
        return f"the record {self.path.name} of {self._recorded_name}"

    @property
    def unused(self) -> list[str]:
        """The recorded exchanges that have not been replayed, one line of text each."""
        return [
            f"line {e.number}: {e.call} {end_of_prompt(e.request)}"
            for e in self._exchanges
            if not e.was_asked
        ]

    async def generate(self, request: GenRequest) -> GenAnswer:
        exchange = self._find("generate", gen_request(request))
        pieces = exchange.line.get("pieces")
        cut: Generated | None = None
        if request.watch is not None and pieces is not None:
            cut = await _play(pieces, request.watch)
        answer = load(GenAnswer, exchange.outcome())
        if request.watch is not None and pieces is None:
            request.watch(answer.texts[0].text, answer.usage.completion_tokens)
        return answer if cut is None else GenAnswer((cut,), answer.usage)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        request = score_request(prompt, choices, unconditional=unconditional)
        answer = self._find("score", request).outcome()
        if "index" in answer:
            return load(ChoiceAnswer, answer)
        return load(ScoreAnswer, answer)

    async def media(self, request: MediaRequest) -> MediaAnswer:
        """The pieces of what was streamed are not recorded: it is one."""
        answer = load(MediaAnswer, self._find("media", media_request(request)).outcome())
        if isinstance(request, SpeechRequest | SpokenRequest) and request.watch is not None:
            text = answer.text if isinstance(request, SpokenRequest) else ""
            request.watch(text, b"" if answer.media is None else answer.media.data)
        return answer

    async def warm(self, prompt: Prompt) -> Usage:
        request = warm_request(prompt)
        if not self._by_key.get(request_key("warm", request)):
            return Usage()
        return load(Usage, self._find("warm", request).outcome())

    async def aflush_cache(self) -> None:
        """Does nothing: there is no cache."""

    async def server_info(self) -> ServerInfo:
        return load(ServerInfo, self._find("server_info", {}).outcome())

    def _find(self, call: str, request: Json) -> Exchange:
        """The exchange to replay, preferably one of the calling branch."""
        branch = branch_name.get()
        with self._lock:
            equal = self._by_key.get(request_key(call, request), [])
            candidates = [exchange for exchange in equal if exchange.branch == branch] or equal
            for exchange in candidates:
                if not exchange.was_asked:
                    exchange.was_asked = True
                    return exchange
            if candidates and candidates[-1].is_repeatable:
                return candidates[-1]
        if candidates:
            answers = "1 answer" if len(candidates) == 1 else f"{len(candidates)} answers"
            raise BackendError(
                f"{self.name} has {answers} to this {call}, which was requested once more: "
                f"{end_of_prompt(request)}"
            )
        raise BackendError(f"{self.name} {describe_unknown(call, request, self._exchanges)}")


async def _play(pieces: Pieces, watch: Watch) -> Generated | None:
    """Pass the recorded pieces to `watch`. Returns the text so far if `watch` ends it early."""
    text, rest = "", list(pieces)
    while rest:
        piece, num_tokens = rest.pop(0)
        text += piece
        await asyncio.sleep(0)
        if watch(piece, num_tokens) and rest:
            return Generated(text, "length")
    return None
