"""Hints that clients of OpenAI, Anthropic and Dynamo send, as the keys of `request_keys.py`.

Owns which fields and headers are read, and how. What is not valid is ignored. Does not own what the
hints do. Pure.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any  # Any: the JSON of a request

from sgl_vllm.protocol.hints import MAX_HINT_LENGTH, MAX_KEEP_S, MAX_KEPT
from sgl_vllm.protocol.request_keys import KEEP, PROGRAM

SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
)
"""Headers that name the session of a request. Of several, the first one counts."""

MARKS = {"cache_control": "5m", "prompt_cache_breakpoint": "30m", "prompt_cache_options": "30m"}
"""Fields that ask to keep what precedes them, with their default `ttl`. The last one appears only
on requests."""

_NAME = re.compile(rf"[^\ud800-\udfff]{{1,{MAX_HINT_LENGTH}}}")
"""JSON can carry half of a surrogate pair, which cannot be sent to an engine."""

_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def with_standard_hints(
    own: object, request: object, headers: Mapping[str, str]
) -> dict[str, Any] | None:
    """A request's `own` `vllm_xargs`, plus its standard hints where `own` has no such key.
    `request` is the body, a mapping or an object. Header names are in lower case."""
    kept = own if isinstance(own, Mapping) else {}
    found = {PROGRAM: _session(request, headers, kept), KEEP: _prefixes_to_keep(request)}
    return {**{key: one for key, one in found.items() if one}, **kept} or None


def agent_priority(request: object) -> int:
    """vLLM's `priority` for the one in Dynamo's `nvext.agent_hints`, where more is more urgent."""
    sent = field(field(field(request, "nvext"), "agent_hints"), "priority")
    return -sent if type(sent) is int and abs(sent) < 1 << 31 else 0


def field(of: object, name: str) -> Any:
    """Clients write them, so values may have any type."""
    return of.get(name) if isinstance(of, dict | Mapping) else getattr(of, name, None)


def _session(request: object, headers: Mapping[str, str], own: Mapping[str, Any]) -> str | None:
    """The name of the request's session. A `prompt_cache_key` may stand for many sessions, so it
    counts only where nothing else names one."""
    names = [field(request, "session_id"), *(headers.get(name) for name in SESSION_HEADERS)]
    names += [own.get("session_id"), field(request, "prompt_cache_key")]
    return next((one for one in names if isinstance(one, str) and _NAME.fullmatch(one)), None)


def _prefixes_to_keep(request: object) -> list[float]:
    """The value of `KEEP`. Where a mark ends is estimated by the lengths of texts. OpenAI's
    `in_memory` asks for no more than every prefix gets."""
    whole_s = max(_keep_s(request), _keep_s(field(request, "nvext")))
    if field(request, "prompt_cache_retention") == "24h":
        whole_s = MAX_KEEP_S
    kept: list[float] = [whole_s, 1] if whole_s else []
    parts = [*_parts(request)]
    marks = [(keep_s, place) for place, part in enumerate(parts) if (keep_s := _keep_s(part))]
    ends = [*itertools.accumulate(map(_num_chars, parts))] if marks else []
    for keep_s, place in marks[: -MAX_KEPT - 1 : -1]:
        kept += [keep_s, ends[place] / ends[-1] if ends[-1] else 1]
    return kept[: 2 * MAX_KEPT]


def _keep_s(of: object) -> int:
    """The most seconds that the marks of a request or a part ask for; 0 if it has none."""
    found = 0
    for name, default in MARKS.items():
        if isinstance(mark := field(of, name), Mapping):
            ttl = mark.get("ttl", default)
            if isinstance(ttl, str) and (read := _DURATION.fullmatch(ttl)):
                found = max(found, min(int(read[1]) * _UNITS_S[read[2]], MAX_KEEP_S))
    return found


def _parts(request: object) -> Iterator[object]:
    """Tools, the parts of the system prompt, and those of messages, in this order."""
    for name in ("tools", "system", "messages", "input"):
        parts = field(request, name)
        for part in parts if isinstance(parts, list) else [parts]:
            content = field(part, "content")
            yield from content if isinstance(content, list) else ()
            yield part


def _num_chars(part: object) -> int:
    """Of its own text, or of a tool's parameters."""
    for text in (part, field(part, "text"), field(part, "content")):
        if isinstance(text, str):
            return len(text)
    schema = field(part, "input_schema") or field(field(part, "function"), "parameters")
    try:
        return len(json.dumps(schema)) if isinstance(schema, Mapping) else 0
    except RecursionError:
        return 0
