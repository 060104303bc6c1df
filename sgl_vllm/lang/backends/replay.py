"""Runs recorded to a file, and played back without a server: for tests, and for looking into a run.

Owns the file's form and the matching of requests to what was recorded. A record is JSON lines for
people to read: a head, then an exchange a line, written as soon as it has ended. ::

    {"sgl_vllm_record": 1, "backend": "the vLLM server at ...", "tells_tokens": true, ...}
    {"call": "generate", "request": {"prompt": "Hello", "sampling": {"temperature": 0.7}},
     "branch": "fork[1]", "repeat": 1, "answer": {"texts": [{"text": ", world", ...}], ...}}

(the second exchange of its kind: ``repeat`` counts from 0, which is left out).

A request is looked up by all that can change its answer: prompt, media, sampling, constraint,
choices. Media are in it by their digest. Keys are never written: a backend has them, no request.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from sgl_vllm.lang.backends.base import (
    Backend,
    ChatPrompt,
    ChoiceAnswer,
    Content,
    GenAnswer,
    Generated,
    GenRequest,
    Prompt,
    ScoreAnswer,
    ServerInfo,
    Usage,
    Watch,
    branch_name,
)
from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling

FORMAT = 1
_SHOWN_CHARS = 30
_SHORTEST_SECRET = 8

Json = dict[str, Any]


class Recorder(Backend):
    """`backend`, with every exchange written to the file at `path`, which is made anew.

    Each line is handed to the operating system as soon as the exchange has ended, so that what
    happened before a crash is there. Errors are recorded, and requests that were cancelled. Used
    as ``with sgl.Recorder(backend, path) as recorder:``, or closed with `close`.
    """

    def __init__(self, backend: Backend, path: str | os.PathLike[str]) -> None:
        self._backend = backend
        self._clean = _Cleaner(backend)
        self._lock = threading.Lock()
        self._repeats: dict[tuple[str, str], int] = defaultdict(int)
        self.path = Path(path)
        self._file: IO[str] | None = self.path.open(
            "w", encoding="utf-8", errors="surrogatepass", newline="\n"
        )
        self._write(
            {
                "sgl_vllm_record": FORMAT,
                "backend": self._clean(backend.name),
                "continues_turns": backend.continues_turns,
                "tells_tokens": backend.tells_tokens,
            }
        )

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def continues_turns(self) -> bool:  # type: ignore[override]
        return self._backend.continues_turns

    @property
    def tells_tokens(self) -> bool:
        return self._backend.tells_tokens

    @tells_tokens.setter
    def tells_tokens(self, told: bool) -> None:
        self._backend.tells_tokens = told

    @property
    def scoreless_methods(self) -> tuple[ChoicesMethod, ...] | None:  # type: ignore[override]
        return self._backend.scoreless_methods

    async def generate(self, request: GenRequest) -> GenAnswer:
        pieces: list[tuple[str, int | None]] = []
        watch = request.watch
        if watch is None:
            asked = request
        else:

            def watch_and_keep(piece: str, num_tokens: int | None) -> bool:
                pieces.append((piece, num_tokens))
                return watch(piece, num_tokens)

            asked = GenRequest(
                request.prompt,
                request.sampling,
                request.constraint,
                watch_and_keep,
            )
        return await self._exchange(
            "generate", _gen_request(request), lambda: self._backend.generate(asked), pieces
        )

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        return await self._exchange(
            "score",
            _score_request(prompt, choices, unconditional=unconditional),
            lambda: self._backend.score(prompt, choices, unconditional=unconditional, warm=warm),
        )

    async def warm(self, prompt: Prompt) -> Usage:
        request = {"prompt": _prompt(prompt)}
        return await self._exchange("warm", request, lambda: self._backend.warm(prompt))

    async def flush_cache(self) -> None:
        await self._backend.flush_cache()

    async def server_info(self) -> ServerInfo:
        return await self._exchange("server_info", {}, self._backend.server_info)

    async def aclose(self) -> None:
        await self._backend.aclose()

    def close(self) -> None:
        """Close the file. The backend itself stays open; what is asked of it later is an error."""
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
        ask: Callable[[], Any],
        pieces: list[tuple[str, int | None]] | None = None,
    ) -> Any:
        if self._file is None:
            raise BackendError(f"the record {self.path} is closed: nothing more can be recorded")
        branch = branch_name.get()
        key = _key(call, request)
        with self._lock:
            repeat = self._repeats[key, branch]
            self._repeats[key, branch] += 1
        line: Json = {"call": call, "request": request}
        if branch:
            line["branch"] = branch
        if repeat:
            line["repeat"] = repeat
        try:
            answer = await ask()
        except BackendError as error:
            self._write({**line, **_pieces(pieces), "error": self._clean.error(error)})
            raise
        except asyncio.CancelledError:
            self._write({**line, "cancelled": True})
            raise
        self._write({**line, **_pieces(pieces), "answer": self._clean.answer(answer)})
        return answer

    def _write(self, line: Json) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._file.flush()


@dataclass
class _Exchange:
    """One line of a record."""

    number: int
    call: str
    request: Json
    branch: str
    repeat: int
    line: Json
    was_asked: bool = False

    @property
    def is_repeatable(self) -> bool:
        """Whether asking once more would have brought the same: no sampling is in it."""
        if "error" in self.line or "cancelled" in self.line:
            return False
        sampling = self.request.get("sampling", {})
        return self.call != "generate" or sampling.get("temperature") == 0


class Replay(Backend):
    """Answers from the record at `path`; no server is asked.

    Requests that are equal in everything are answered in the order in which they were asked when
    recorded, those of one branch apart from those of the others: branches and programs that run
    side by side get what they got. Asked more often than recorded, a request without chance in it
    (temperature 0, a select) gets its last answer again, any other is an error. A request that was
    not recorded raises a BackendError that says what differs from the nearest one; a prefix hint
    that was not recorded costs nothing. FileNotFoundError without such a file, ValueError for one
    that is no record. A record whose last line was cut off by a crash is read without it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        head, self._exchanges = _read(self.path)
        self._recorded_name = str(head.get("backend"))
        self._continues_turns = bool(head.get("continues_turns", True))
        self._tells_tokens = bool(head.get("tells_tokens", False))
        self._lock = threading.Lock()
        self._by_key: dict[str, list[_Exchange]] = defaultdict(list)
        for exchange in sorted(self._exchanges, key=lambda e: (e.branch, e.repeat)):
            self._by_key[_key(exchange.call, exchange.request)].append(exchange)

    @property
    def name(self) -> str:
        return f"the record {self.path.name} of {self._recorded_name}"

    @property
    def continues_turns(self) -> bool:  # type: ignore[override]
        return self._continues_turns

    @property
    def tells_tokens(self) -> bool:
        return self._tells_tokens

    @tells_tokens.setter
    def tells_tokens(self, told: bool) -> None:
        self._tells_tokens = told

    @property
    def unused(self) -> list[str]:
        """The recorded exchanges that nobody has asked for yet, a line of text each."""
        return [
            f"line {e.number}: {e.call} {_shown(_text_of(e.request))}"
            for e in self._exchanges
            if not e.was_asked
        ]

    async def generate(self, request: GenRequest) -> GenAnswer:
        exchange = self._find("generate", _gen_request(request))
        pieces = exchange.line.get("pieces")
        cut: Generated | None = None
        if request.watch is not None and pieces is not None:
            cut = await _play(pieces, request.watch)
        answer: GenAnswer = _load(GenAnswer, _outcome(exchange))
        if request.watch is not None and pieces is None:
            request.watch(answer.texts[0].text, answer.usage.completion_tokens)
        return answer if cut is None else GenAnswer((cut,), answer.usage)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        request = _score_request(prompt, choices, unconditional=unconditional)
        answer = _outcome(self._find("score", request))
        if "index" in answer:
            return _load(ChoiceAnswer, answer)
        return _load(ScoreAnswer, answer)

    async def warm(self, prompt: Prompt) -> Usage:
        request = {"prompt": _prompt(prompt)}
        if not self._by_key.get(_key("warm", request)):
            return Usage()
        return _load(Usage, _outcome(self._find("warm", request)))

    async def flush_cache(self) -> None:
        """There is no cache."""

    async def server_info(self) -> ServerInfo:
        return _load(ServerInfo, _outcome(self._find("server_info", {})))

    def _find(self, call: str, request: Json) -> _Exchange:
        branch = branch_name.get()
        with self._lock:
            same = self._by_key.get(_key(call, request), [])
            of_branch = [exchange for exchange in same if exchange.branch == branch]
            for exchange in of_branch or same:
                if not exchange.was_asked:
                    exchange.was_asked = True
                    return exchange
            if same and (of_branch or same)[-1].is_repeatable:
                return (of_branch or same)[-1]
        if same:
            raise BackendError(
                f"{self.name} has this {call} {len(of_branch or same)} times, and it is asked once "
                f"more: {_shown(_text_of(request))}"
            )
        raise BackendError(self._what_differs(call, request))

    def _what_differs(self, call: str, request: Json) -> str:
        said = f"{self.name} has no such {call}"
        candidates = [exchange for exchange in self._exchanges if exchange.call == call]
        if not candidates:
            return f"{said}, and no other one: {_shown(_text_of(request))}"
        nearest = max(candidates, key=lambda exchange: _likeness(request, exchange.request))
        differences = "; ".join(_differences(request, nearest.request))
        return f"{said}; the nearest is that of line {nearest.number}: {differences}"


# --- requests as they are written ----------------------------------------------------------------


def _gen_request(request: GenRequest) -> Json:
    written: Json = {"prompt": _prompt(request.prompt), "sampling": _sampling(request.sampling)}
    if request.constraint is not None:
        written[request.constraint.kind.name] = request.constraint.value
    return written


def _score_request(prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool) -> Json:
    written: Json = {"prompt": _prompt(prompt), "choices": list(choices)}
    if unconditional:
        written["unconditional"] = True
    return written


def _sampling(sampling: Sampling) -> Json:
    """What differs from the defaults."""
    return {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in fields(sampling)
        if (value := getattr(sampling, f.name)) != getattr(DEFAULT_SAMPLING, f.name)
    }


def _prompt(prompt: Prompt) -> Any:
    if not isinstance(prompt, ChatPrompt):
        return prompt.text
    turns = [{m.role: _content(m.content)} for m in prompt.messages]
    return {"turns": turns, "ending": prompt.ending}


def _content(content: Content) -> Any:
    if isinstance(content, str):
        return content
    return [part if isinstance(part, str) else _media(part) for part in content]


def _media(media: Media) -> Json:
    """A medium by its digest; of an address only what holds no key."""
    digest = hashlib.sha256(media.url.encode()).hexdigest()[:32]
    written: Json = {media.kind: f"sha256:{digest}"}
    if not media.url.startswith("data:"):
        address = urlsplit(media.url)
        written["from"] = f"{address.scheme}://{address.hostname}{address.path}"
    if media.num_frames is not None:
        written["num_frames"] = media.num_frames
    return written


def _pieces(pieces: list[tuple[str, int | None]] | None) -> Json:
    return {"pieces": pieces} if pieces else {}


def _key(call: str, request: Json) -> str:
    return json.dumps([call, request])  # in their order: that of a schema's keys means something


class _Cleaner:
    """Takes keys out of what a server says, and writes answers and errors."""

    def __init__(self, backend: Backend) -> None:
        named = [value for name, value in os.environ.items() if name.endswith("API_KEY")]
        own = getattr(backend, "_api_key", None)
        secrets = {s for s in (*named, own) if isinstance(s, str) and len(s) >= _SHORTEST_SECRET}
        self._secrets = sorted(secrets, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return re.sub(r"://[^/@\s]+@", "://", text)

    def error(self, error: BackendError) -> Json:
        written: Json = {"message": self(str(error))}
        if error.status is not None:
            written["status"] = error.status
        if isinstance(error, UnsupportedError):
            written |= {"backend": self(error.backend), "feature": error.feature}
        return written

    def answer(self, answer: Any) -> Any:
        written = _compact(answer)
        if isinstance(answer, ServerInfo):
            written["url"] = self(answer.url)
        return written


def _compact(value: Any) -> Any:
    """A dataclass as a dict, without the fields that have their default."""
    if is_dataclass(value):
        return {
            f.name: _compact(getattr(value, f.name))
            for f in fields(value)
            if f.default is MISSING or getattr(value, f.name) != f.default
        }
    if isinstance(value, Mapping):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_compact(item) for item in value]
    return value


# --- reading -------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[Json, list[_Exchange]]:
    lines = path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")
    head = _line(lines[0])
    if head is None or head.get("sgl_vllm_record") != FORMAT:
        raise ValueError(f"{path} is no record of a run that this version can read")
    exchanges = []
    for number, text in enumerate(lines[1:], start=2):
        line = _line(text)
        if line is not None and "call" in line and "request" in line:
            exchanges.append(
                _Exchange(
                    number,
                    line["call"],
                    line["request"],
                    line.get("branch", ""),
                    line.get("repeat", 0),
                    line,
                )
            )
        elif text.strip() and number < len(lines):
            raise ValueError(f"line {number} of {path} is no exchange")
    return head, exchanges


def _line(text: str) -> Json | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _outcome(exchange: _Exchange) -> Json:
    """The answer, or the error raised again."""
    line = exchange.line
    if "cancelled" in line:
        raise BackendError("this request was cancelled when it was recorded")
    if "error" not in line:
        answer: Json = line["answer"]
        return answer
    error = line["error"]
    message = error["message"]
    if "feature" in error:
        backend, feature = error["backend"], error["feature"]
        advice = message.removeprefix(f"{feature} is not supported by {backend}: ")
        raise UnsupportedError(backend, feature, advice)
    raise BackendError(message, status=error.get("status"))


def _load(kind: Any, written: Json) -> Any:
    """The dataclass `kind` that `_compact` has written."""
    return _adapter(kind).validate_python(written)


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


async def _play(pieces: Iterable[tuple[str, int | None]], watch: Watch) -> Generated | None:
    """Give `watch` the pieces as they came. What has come if it has enough before their end."""
    text, rest = "", list(pieces)
    while rest:
        piece, num_tokens = rest.pop(0)
        text += piece
        await asyncio.sleep(0)
        if watch(piece, num_tokens) and rest:
            return Generated(text, "length")
    return None


# --- what differs --------------------------------------------------------------------------------


def _text_of(request: Json) -> str:
    """A request's prompt as one text, for comparing and showing."""
    prompt = request.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    texts = []
    for turn in prompt["turns"]:
        ((role, content),) = turn.items()
        parts = [content] if isinstance(content, str) else content
        shown = (p if isinstance(p, str) else json.dumps(p, sort_keys=True) for p in parts)
        texts.append(f"{role}: {''.join(shown)}\n")
    return "".join(texts)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 2 * _SHOWN_CHARS else "…" + text[-2 * _SHOWN_CHARS :])


def _common(a: str, b: str) -> int:
    """How long the common beginning is."""
    known, most = 0, min(len(a), len(b))
    while known < most:
        middle = (known + most + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _likeness(a: Json, b: Json) -> tuple[float, int]:
    text_a, text_b = _text_of(a), _text_of(b)
    longest = max(len(text_a), len(text_b), 1)
    shortest = min(len(text_a), len(text_b))
    begin = _common(text_a, text_b)
    end = min(_common(text_a[::-1], text_b[::-1]), shortest - begin)
    return (begin + end) / longest, -len(list(_differences(a, b)))


def _differences(asked: Json, recorded: Json) -> Iterable[str]:
    """What is not the same, in words; small."""
    for name in dict.fromkeys((*asked, *recorded)):
        mine, theirs = asked.get(name), recorded.get(name)
        if mine == theirs:
            continue
        if name == "prompt":
            yield _prompt_difference(asked, recorded)
        elif name == "sampling":
            for option in dict.fromkeys((*(mine or {}), *(theirs or {}))):
                default = getattr(DEFAULT_SAMPLING, option, None)
                now, then = (mine or {}).get(option, default), (theirs or {}).get(option, default)
                if now != then:
                    yield f"{option} is {now!r}, was {then!r}"
        else:
            yield f"{name} is {_brief(mine)}, was {_brief(theirs)}"


def _brief(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 3 * _SHOWN_CHARS else shown[: 3 * _SHOWN_CHARS] + "…"


def _prompt_difference(asked: Json, recorded: Json) -> str:
    mine, theirs = _text_of(asked), _text_of(recorded)
    if mine == theirs:
        return "the turns of the prompt end in another way"
    place = _common(mine, theirs)
    begin = max(0, place - _SHOWN_CHARS // 3)

    def around(text: str) -> str:
        cut = text[begin : place + _SHOWN_CHARS]
        return repr("…" * (begin > 0) + cut + "…" * (place + _SHOWN_CHARS < len(text)))

    return f"the prompt at character {place} is {around(mine)}, was {around(theirs)}"
