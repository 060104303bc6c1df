"""How a request differs from recorded ones, in words.

Owns finding the most similar recorded request and describing the differences briefly. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.record import Exchange
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING

_SHOWN_CHARS = 30


def describe_unknown(call: str, request: Json, recorded: Sequence[Exchange]) -> str:
    """Why no exchange in `recorded` answers `request`."""
    candidates = [exchange for exchange in recorded if exchange.call == call]
    if not candidates:
        return f"has no {call} at all: {end_of_prompt(request)}"
    nearest = max(candidates, key=lambda exchange: _similarity(request, exchange.request))
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
    if isinstance(prompt, str):
        return prompt
    texts = []
    for turn in prompt["turns"]:
        ((role, content),) = turn.items()
        parts = [content] if isinstance(content, str) else content
        shown = (p if isinstance(p, str) else json.dumps(p, sort_keys=True) for p in parts)
        texts.append(f"{role}: {''.join(shown)}\n")
    return "".join(texts)


def _common_length(a: str, b: str) -> int:
    """The length of the common prefix."""
    known, most = 0, min(len(a), len(b))
    while known < most:
        middle = (known + most + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _similarity(a: Json, b: Json) -> tuple[float, int]:
    text_a, text_b = _text_of(a), _text_of(b)
    longest = max(len(text_a), len(text_b), 1)
    shortest = min(len(text_a), len(text_b))
    begin = _common_length(text_a, text_b)
    end = min(_common_length(text_a[::-1], text_b[::-1]), shortest - begin)
    return (begin + end) / longest, -len(list(_differences(a, b)))


def _differences(asked: Json, recorded: Json) -> Iterable[str]:
    for name in dict.fromkeys((*asked, *recorded)):
        now, then = asked.get(name), recorded.get(name)
        if now == then:
            continue
        if name == "prompt":
            yield _prompt_difference(_text_of(asked), _text_of(recorded))
        elif name == "sampling":
            yield from _option_differences(now or {}, then or {})
        else:
            yield f"{name} is {_brief(now)}, was {_brief(then)}"


def _option_differences(asked: Json, recorded: Json) -> Iterable[str]:
    for option in dict.fromkeys((*asked, *recorded)):
        default = getattr(DEFAULT_SAMPLING, option, None)
        now, then = asked.get(option, default), recorded.get(option, default)
        if now != then:
            yield f"{option} is {now!r}, was {then!r}"


def _brief(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 3 * _SHOWN_CHARS else shown[: 3 * _SHOWN_CHARS] + "…"


def _prompt_difference(asked: str, recorded: str) -> str:
    if asked == recorded:
        return "the last turn of the prompt ends differently"
    place = _common_length(asked, recorded)
    begin = max(0, place - _SHOWN_CHARS // 3)

    def around(text: str) -> str:
        cut = text[begin : place + _SHOWN_CHARS]
        return repr("…" * (begin > 0) + cut + "…" * (place + _SHOWN_CHARS < len(text)))

    return f"the prompt at character {place} is {around(asked)}, was {around(recorded)}"
