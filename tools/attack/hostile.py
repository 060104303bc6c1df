"""Hostile requests, made from a seed: formats, hints, and bodies that cannot be read.

Owns what is sent, not how. Pure: the same seed gives the same requests. No body is larger than
about a megabyte.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any  # Any: JSON

from tests.hostile_formats import FORMATS

Json = dict[str, Any]

NESTING = 100_000
LONG = "x" * 100_000
HALF_A_PAIR = "\ud800"
"""Half of a surrogate pair. JSON can carry it; UTF-8 cannot."""

TEXTS = (
    *("", "x", "a b", "\0", "\n", "\x1b[31m", "é", "😀", "\u2028", HALF_A_PAIR, "\ud83d\ude00"),
    *("../..", "a/b\\c", "@", "null", "1e999", "{}", "%s", "</s>", "x" * 300, "é" * 5_000),
)
NUMBERS = (
    *(0, 1, -1, 7, 255, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64, 2**70, 10**400),
    *(0.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
)
HINTS = (
    *("sgl_program", "sgl_fork_group", "sgl_ends", "sgl_next_tool", "sgl_next_in_s", "sgl_ahead"),
    *("sgl_report", "sgl_score_from", "sgl_unknown"),
)


@dataclass(frozen=True)
class Attack:
    """One request.

    Attributes:
        kind: what is hostile in it.
        path: the route.
        body: the body as it is sent.
        headers: besides the content type.
        method: of HTTP.
        leaves_after_s: when its client leaves; None if it stays for the answer.
    """

    kind: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    leaves_after_s: float | None = None


@dataclass(frozen=True)
class Phase:
    """Requests of one kind, `at_once` of which are under way. A 500 is a right answer only to
    formats that others keep from being compiled."""

    name: str
    requests: list[Attack]
    at_once: int
    may_fail: bool = False


def value(rng: random.Random, depth: int = 2) -> Any:
    """Any JSON."""
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice((None, True, False)),
        lambda: rng.randint(-5, 5_000),
    ]
    if depth:
        makers += [
            lambda: [value(rng, depth - 1) for _ in range(rng.randint(0, 3))],
            lambda: {rng.choice(TEXTS): value(rng, depth - 1) for _ in range(rng.randint(0, 3))},
        ]
    return rng.choice(makers)()


def completion(**fields: Any) -> Json:
    """A harmless request, with `fields` added or replaced."""
    return {"model": "demo", "prompt": "Hi", "max_tokens": 4, "temperature": 0, **fields}


def chat(**fields: Any) -> Json:
    body = completion(**{"messages": [{"role": "user", "content": "Hi"}], **fields})
    del body["prompt"]
    return body


def attack(kind: str, path: str, body: Any, **headers: str) -> Attack:
    """`body` is JSON, `path` begins after `/v1`. Encoded in ASCII, so that half of a surrogate
    pair can be sent."""
    return Attack(kind, f"/v1/{path}", json.dumps(body).encode(), headers)


# -- formats


def formats(rng: random.Random, count: int) -> Iterator[Attack]:
    """Requests with `count` hostile formats, of every kind in turn, each with other numbers."""
    known = list(FORMATS.items())
    for number in range(count):
        kind, (structured, _) = known[number % len(known)]
        yield attack(kind, "completions", completion(structured_outputs=_varied(structured, rng)))


def _varied(structured: Json, rng: random.Random) -> Json:
    """A format with other numbers, so that it is compiled anew: from half of each one up to it."""

    def other(found: re.Match[str]) -> str:
        number = int(found[0])
        return str(rng.randint((number + 1) // 2, number))

    # Numbers in rule names stay: changing them would leave references to rules that do not exist.
    changed: Json = json.loads(
        re.sub(r"(?<![a-z0-9])\d+", other, json.dumps(structured, ensure_ascii=False))
    )
    return changed


# -- floods of the plugin's own routes


def unreadable() -> Iterator[Attack]:
    """Bodies that are no JSON object, or are nested deeply, for every route that reads one."""
    paths = ["pin", "unpin", "batch", "batch/abort", "score", "match"]
    for path in [*(f"/v1/sgl/{path}" for path in paths), "/v1/completions"]:
        yield Attack("nested", path, b'{"a":' * NESTING + b"1" + b"}" * NESTING)
        yield Attack("nested array", path, b"[" * NESTING)
        yield Attack("not JSON", path, b"{" + LONG.encode())
        yield Attack("not UTF-8", path, b'{"prompt": "\xff\xfe"}')
        yield Attack("empty", path, b"")


def pins(rng: random.Random, count: int) -> Iterator[Attack]:
    """Pins of new prefixes, more than may be pinned, and unpins of what is not pinned."""
    for number in range(count):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(1, 400))]
        yield attack("pin", "sgl/pin", {"prompt": prompt, "cache_salt": f"salt {number % 3}"})
        if number % 10 == 0:
            ids = ",".join(f"{rng.getrandbits(64):x}" for _ in range(rng.choice([1, 2, 50_000])))
            yield attack("unpin", "sgl/unpin", {"pin_id": ids})
    yield attack("long pin", "sgl/pin", {"prompt": "word " * 200_000})
    yield attack("long pin", "sgl/pin", {"prompt": [7] * 100_000})


def batches(rng: random.Random, count: int, size: int) -> Iterator[Attack]:
    """Batches of which every request is small and some are bad."""
    for number in range(count):
        requests = []
        for index in range(size):
            body = completion(prompt=[rng.randrange(10, 4000) for _ in range(8)], max_tokens=1)
            if rng.random() < 0.2:
                body |= {"n": rng.choice([-1, 0, "x"]), "stream": True}
            requests.append({"id": f"{number}-{index}", "path": "completions", "body": body})
        yield attack("batch", "sgl/batch", {"requests": requests})
    too_many = [{"path": "completions", "body": {}}] * 20_000
    yield attack("batch too large", "sgl/batch", {"requests": too_many})
    yield attack("aborts", "sgl/batch/abort", {"ids": [f"{number}" for number in range(50_000)]})


QUESTIONS = (
    "/metrics",
    *("/v1/sgl/stats", "/v1/sgl/tree", "/v1/sgl/pins", "/v1/sgl/why?request=none"),
)


def scrapes(count: int) -> Iterator[Attack]:
    """Questions that the server passes on to its engines."""
    for number in range(count):
        path = QUESTIONS[number % len(QUESTIONS)]
        yield Attack(path, path, method="GET")


# -- a mix of ordinary requests, of which half are to be cut off


def mixed(rng: random.Random, count: int) -> Iterator[Attack]:
    """Requests of all kinds, half of which are cut off at a random time."""
    shared = [[rng.randrange(10, 4000) for _ in range(rng.randint(20, 400))] for _ in range(6)]
    for number in range(count):
        prompt = [*rng.choice(shared)[: rng.randint(1, 400)], rng.randrange(10, 4000)]
        schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {}}}
        kinds: dict[str, Json] = {
            "plain": {},
            "stream": {"stream": True},
            "salt": {"cache_salt": f"salt {number % 4}"},
            "n": {"n": rng.randint(2, 4), "temperature": 1.0},
            "regex": {"structured_outputs": {"regex": rng.choice(["[0-9]{3,9}", "yes, it|no"])}},
            "schema": {"structured_outputs": {"json": schema}},
            "logprobs": {"prompt_logprobs": 0, "vllm_xargs": {"sgl_score_from": len(prompt)}},
            "chat": {"messages": [{"role": "user", "content": f"Question {number % 9}"}]},
        }
        kind = rng.choice(list(kinds))
        fields = {"max_tokens": rng.randint(1, 40), "ignore_eos": True, **kinds[kind]}
        path = "chat/completions" if kind == "chat" else "completions"
        body = chat(**fields) if kind == "chat" else completion(prompt=prompt, **fields)
        leaves_after_s = rng.uniform(0.0, 0.8) if rng.random() < 0.5 else None
        yield replace(attack(f"mixed: {kind}", path, body), leaves_after_s=leaves_after_s)
