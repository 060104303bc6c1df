"""The file format of recorded runs: requests, answers and errors as JSON lines.

Owns what is written for each of them, reading it back, and how a request differs from recorded
ones, in words. `replay.py` records and replays. A record is a head and then one line per exchange,
readable and written as soon as the exchange ends::

    {"sgl_vllm_record": 1, "backend": "the vLLM server at ...", "tells_tokens": true, ...}
    {"call": "generate", "request": {"prompt": "Hello", "sampling": {"temperature": 0.7}},
     "branch": "fork[1]", "repeat": 1, "answer": {"texts": [{"text": ", world", ...}], ...}}

``repeat`` counts equal requests of one branch from 0, which is not written: this is the second.

A request contains everything that can change its answer: prompt, media, sampling, constraint and
choices. Media are represented by a digest in requests, and are whole in answers, as data URLs in
base64. API keys are never written: backends have them, requests do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar  # Any: adapters of several kinds
from urllib.parse import urlsplit

from sgl_vllm.lang.backends.base import Backend, Json
from sgl_vllm.lang.backends.requests import GenRequest, MediaRequest
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.media import Media, ServiceOptions
from sgl_vllm.lang.prompts import ChatPrompt, Prompt, TextPrompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.text import shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

FORMAT = 1
_MIN_SECRET_CHARS = 8


# --- requests ------------------------------------------------------------------------------------


def gen_request(request: GenRequest) -> Json:
    written = _fields({"prompt": request.prompt, "sampling": request.sampling})
    if request.constraint is not None:
        written[request.constraint.kind.name] = request.constraint.value
    return written


def score_request(prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Json:
    written = _fields({"prompt": prompt, "choices": list(choices)})
    return {**written, "unconditional": True} if unconditional else written


def warm_request(prompt: Prompt) -> Json:
    return _fields({"prompt": prompt})


def media_request(request: MediaRequest) -> Json:
    """Fields at their default are left out."""
    given = {f.name: getattr(request, f.name) for f in fields(request) if f.compare}
    defaults = {f.name: f.default for f in fields(request)} | {"options": ServiceOptions()}
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    return {"feature": request.feature, **_fields(changed)}


def _fields(given: Mapping[str, object]) -> Json:
    return {name: _written(value) for name, value in given.items()}


def _written(value: object) -> object:
    match value:
        case Sampling():  # the options that differ from the defaults
            given, defaults = asdict(value), asdict(DEFAULT_SAMPLING)
            return {name: compact(one) for name, one in given.items() if one != defaults[name]}
        case TextPrompt():
            return value.text
        case ChatPrompt():
            turns = [{m.role: _written(m.content)} for m in value.messages]
            return {"turns": turns, "ending": value.ending}
        case tuple():  # the parts of a turn
            return [_written(part) for part in value]
        case Media():
            return _digest(value)
    return compact(value)


def _digest(media: Media) -> Json:
    """A digest. Of a URL, only the parts that cannot contain a key."""
    digest = hashlib.sha256(media.url.encode()).hexdigest()[:32]
    written: Json = {media.kind: f"sha256:{digest}"}
    if not media.url.startswith("data:"):
        address = urlsplit(media.url)
        written["from"] = f"{address.scheme}://{address.hostname}{address.path}"
    if media.num_frames is not None:
        written["num_frames"] = media.num_frames
    return written


def request_key(call: str, request: Json) -> str:
    """Equal for equal requests. The order of keys counts, because that of a JSON schema's keys is
    the order in which the model writes them."""
    return json.dumps([call, request])


# --- answers and errors --------------------------------------------------------------------------


def error_written(error: BackendError) -> Json:
    given = {name: value for name, value in vars(error).items() if value is not None}
    return {"message": str(error), **given}


def keys_of(backend: Backend) -> list[str]:
    """What no record may contain, longest first."""
    named = [value for name, value in os.environ.items() if name.endswith("API_KEY")]
    keys = {key for key in (*named, *backend.secrets) if len(key) >= _MIN_SECRET_CHARS}
    return sorted(keys, key=len, reverse=True)


def without_keys(written: Json, keys: Sequence[str]) -> Json:
    """The same without keys, and without user names and passwords in URLs."""
    text = json.dumps(written)
    for key in keys:
        text = text.replace(json.dumps(key)[1:-1], "***")
    kept: Json = json.loads(re.sub(r"://[^/@\s\"]+@", "://", text))
    return kept


def compact(value: object) -> Any:
    """An answer as JSON. Fields of dataclasses at their default are left out."""
    if is_dataclass(value):
        return {
            f.name: compact(getattr(value, f.name))
            for f in fields(value)
            if f.default is MISSING or getattr(value, f.name) != f.default
        }
    if isinstance(value, Mapping):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [compact(item) for item in value]
    return value


def load(kind: type[T], written: object) -> T:
    """The dataclass of type `kind` that `compact` wrote."""
    if kind.__name__ not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind.__name__] = TypeAdapter(kind)
    loaded: T = _adapters[kind.__name__].validate_python(written)
    return loaded


_adapters: dict[str, TypeAdapter[Any]] = {}  # of this module's few kinds, by name


# --- reading a record ----------------------------------------------------------------------------


@dataclass
class Exchange:
    """One line of a record. `line` has its outcome; `was_asked` is set when it is replayed."""

    number: int
    call: str
    request: Json
    branch: str
    repeat: int
    line: Json
    was_asked: bool = False

    @property
    def is_repeatable(self) -> bool:
        """Whether asking again would have given the same answer, because nothing was sampled."""
        if "error" in self.line or "cancelled" in self.line:
            return False
        if self.call == "media":
            return False
        sampling = self.request.get("sampling", {})
        return self.call != "generate" or sampling.get("temperature") == 0

    def outcome(self) -> Json:
        """The answer; a recorded error is raised again."""
        if "cancelled" in self.line:
            raise BackendError("this request was cancelled when it was recorded")
        if "error" not in self.line:
            answer: Json = self.line["answer"]
            return answer
        error = self.line["error"]
        message = error["message"]
        if "feature" in error:
            raise UnsupportedError(error["backend"], error["feature"], error.get("advice", message))
        raise BackendError(message, status=error.get("status"))


def read_record(path: Path) -> tuple[Json, list[Exchange]]:
    """The head of the record at `path`, and its exchanges.

    A last line that a crash cut off is ignored. Raises FileNotFoundError, and ValueError for a
    file that is not a record.
    """
    lines = path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")
    head = _json_object(lines[0])
    if head is None or head.get("sgl_vllm_record") != FORMAT:
        raise ValueError(f"{path} is not a record of a run in a format that this version can read")
    exchanges = []
    for number, text in enumerate(lines[1:], start=2):
        line = _json_object(text)
        if line is not None and "call" in line and "request" in line:
            branch, repeat = line.get("branch", ""), line.get("repeat", 0)
            exchanges.append(Exchange(number, line["call"], line["request"], branch, repeat, line))
        elif text.strip() and number < len(lines):
            raise ValueError(f"line {number} of {path} is not an exchange")
    return head, exchanges


def _json_object(text: str) -> Json | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


# --- what was not recorded -----------------------------------------------------------------------

_SHOWN_CHARS = 30


def describe_unknown(call: str, request: Json, recorded: Sequence[Exchange]) -> str:
    """Why no exchange in `recorded` answers `request`: how the most similar one differs."""
    candidates = [exchange for exchange in recorded if exchange.call == call]
    if not candidates:
        return f"has no {call} at all: {end_of_prompt(request)}"
    text = _text_of(request)

    def similarity(exchange: Exchange) -> tuple[float, int]:
        other = _text_of(exchange.request)
        begin = _common_length(text, other)
        end = _common_length(text[begin:][::-1], other[begin:][::-1])
        longest = max(len(text), len(other), 1)
        return (begin + end) / longest, -len(list(_differences(request, exchange.request)))

    nearest = max(candidates, key=similarity)
    differences = "; ".join(_differences(request, nearest.request))
    return f"has no such {call}; the most similar one is on line {nearest.number}: {differences}"


def end_of_prompt(request: Json) -> str:
    """The end of a request's prompt, quoted."""
    text = _text_of(request)
    return repr(text if len(text) <= 2 * _SHOWN_CHARS else "…" + text[-2 * _SHOWN_CHARS :])


def _text_of(request: Json) -> str:
    """The prompt as one text, or what is to be spoken or drawn."""
    named = (request[name] for name in ("prompt", "text", "description") if name in request)
    prompt = next(named, "")
    return prompt if isinstance(prompt, str) else json.dumps(prompt["turns"], ensure_ascii=False)


def _common_length(a: str, b: str) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def _differences(asked: Json, recorded: Json) -> Iterator[str]:
    for name in dict.fromkeys((*asked, *recorded)):
        now, then = asked.get(name), recorded.get(name)
        if now == then:
            continue
        if name == "sampling":
            defaults = _fields(asdict(DEFAULT_SAMPLING))
            yield from _differences({**defaults, **(now or {})}, {**defaults, **(then or {})})
        elif name == "prompt":
            yield _prompt_difference(_text_of(asked), _text_of(recorded))
        else:
            written = (json.dumps(one, ensure_ascii=False) for one in (now, then))
            is_now, was = (shortened(one, 3 * _SHOWN_CHARS) for one in written)
            yield f"{name} is {is_now}, was {was}"


def _prompt_difference(asked: str, recorded: str) -> str:
    if asked == recorded:
        return "the last turn of the prompt ends differently"
    place = _common_length(asked, recorded)
    begin = max(0, place - _SHOWN_CHARS // 3)
    now, then = (
        repr("…" * (begin > 0) + shortened(text[begin:], place + _SHOWN_CHARS - begin))
        for text in (asked, recorded)
    )
    return f"the prompt at character {place} is {now}, was {then}"
