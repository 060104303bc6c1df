"""The file format of recorded runs: requests, answers and errors as JSON lines.

Owns what is written for each of them, and reading it back. `replay.py` records and replays. A
record is a head and then one line per exchange, readable and written as soon as the exchange
ends::

    {"sgl_vllm_record": 1, "backend": "the vLLM server at ...", "tells_tokens": true, ...}
    {"call": "generate", "request": {"prompt": "Hello", "sampling": {"temperature": 0.7}},
     "branch": "fork[1]", "repeat": 1, "answer": {"texts": [{"text": ", world", ...}], ...}}

``repeat`` counts equal requests of one branch from 0, which is not written: this is the second.

A request contains everything that can change its answer: prompt, media, sampling, constraint and
choices. Media are represented by a digest in requests, and are whole in answers, as data URLs in
base64. API keys are never written: backends have them,
requests do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar  # Any: adapters of several kinds
from urllib.parse import urlsplit

from sgl_vllm.lang.backends.base import Backend, Json
from sgl_vllm.lang.backends.requests import GenRequest, MediaRequest, ServerInfo
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.media_options import ServiceOptions
from sgl_vllm.lang.prompts import ChatPrompt, Content, Prompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

FORMAT = 1
_MIN_SECRET_CHARS = 8


# --- requests ------------------------------------------------------------------------------------


def gen_request(request: GenRequest) -> Json:
    written: Json = {
        "prompt": prompt_json(request.prompt),
        "sampling": _sampling(request.sampling),
    }
    if request.constraint is not None:
        written[request.constraint.kind.name] = request.constraint.value
    return written


def score_request(prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Json:
    written: Json = {"prompt": prompt_json(prompt), "choices": list(choices)}
    if unconditional:
        written["unconditional"] = True
    return written


def warm_request(prompt: Prompt) -> Json:
    return {"prompt": prompt_json(prompt)}


def media_request(request: MediaRequest) -> Json:
    """Fields at their default are left out."""
    written: Json = {"feature": request.feature}
    for f in fields(request):
        value = getattr(request, f.name)
        if f.compare and value not in (f.default, ServiceOptions()):
            written[f.name] = _field(value)
    return written


def _field(value: object) -> object:
    match value:
        case Sampling():
            return _sampling(value)
        case ChatPrompt():
            return prompt_json(value)
        case Media():
            return _media(value)
    return _compact(value)


def request_key(call: str, request: Json) -> str:
    """Equal for equal requests. The order of keys counts, because that of a JSON schema's keys is
    the order in which the model writes them."""
    return json.dumps([call, request])


def _sampling(sampling: Sampling) -> Json:
    """The options that differ from the defaults."""
    return {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in fields(sampling)
        if (value := getattr(sampling, f.name)) != getattr(DEFAULT_SAMPLING, f.name)
    }


def prompt_json(prompt: Prompt) -> str | Json:
    if not isinstance(prompt, ChatPrompt):
        return prompt.text
    turns = [{m.role: _content(m.content)} for m in prompt.messages]
    return {"turns": turns, "ending": prompt.ending}


def _content(content: Content) -> str | list[str | Json]:
    if isinstance(content, str):
        return content
    return [part if isinstance(part, str) else _media(part) for part in content]


def _media(media: Media) -> Json:
    """A digest. Of a URL, only the parts that cannot contain a key."""
    digest = hashlib.sha256(media.url.encode()).hexdigest()[:32]
    written: Json = {media.kind: f"sha256:{digest}"}
    if not media.url.startswith("data:"):
        address = urlsplit(media.url)
        written["from"] = f"{address.scheme}://{address.hostname}{address.path}"
    if media.num_frames is not None:
        written["num_frames"] = media.num_frames
    return written


# --- answers and errors --------------------------------------------------------------------------


class AnswerWriter:
    """Writes a backend's answers and errors as JSON, with API keys removed."""

    def __init__(self, backend: Backend) -> None:
        named = [value for name, value in os.environ.items() if name.endswith("API_KEY")]
        secrets = {s for s in (*named, *backend.secrets) if len(s) >= _MIN_SECRET_CHARS}
        self._secrets = sorted(secrets, key=len, reverse=True)

    def text(self, text: str) -> str:
        """`text` without keys, and without user names and passwords in URLs."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return re.sub(r"://[^/@\s]+@", "://", text)

    def error(self, error: BackendError) -> Json:
        written: Json = {"message": self.text(str(error))}
        if error.status is not None:
            written["status"] = error.status
        if isinstance(error, UnsupportedError):
            written |= {"backend": self.text(error.backend), "feature": error.feature}
        return written

    def answer(self, answer: object) -> object:
        """An answer, which is a dataclass. Fields at their default are left out."""
        written = _compact(answer)
        if isinstance(answer, ServerInfo) and isinstance(written, dict):
            written["url"] = self.text(answer.url)
        return written


def _compact(value: object) -> object:
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


def load(kind: type[T], written: object) -> T:
    """The dataclass of type `kind` that `AnswerWriter.answer` wrote."""
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
            backend, feature = error["backend"], error["feature"]
            advice = message.removeprefix(f"{feature} is not supported by {backend}: ")
            raise UnsupportedError(backend, feature, advice)
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
