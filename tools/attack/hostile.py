"""Hostile requests, made from a seed: formats, hints, and bodies that cannot be read.

Owns what is sent, not how. Pure: the same seed gives the same requests. No body is larger than
about a megabyte.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any  # Any: JSON

Json = dict[str, Any]
Make = Callable[[random.Random], Json]

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
    *("sgl_step", "sgl_graph", "sgl_report", "sgl_score_from", "sgl_unknown"),
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
    """Requests with `count` hostile formats, of every kind in turn."""
    makers = list(_FORMATS.items())
    for number in range(count):
        kind, make = makers[number % len(makers)]
        yield attack(kind, "completions", completion(structured_outputs=make(rng)))


def _regex_of_counts(rng: random.Random) -> Json:
    text = rng.choice("ab.")
    for _ in range(rng.randint(1, 4)):
        low = rng.randint(0, 2000)
        text = f"({text}){{{low},{low + rng.randint(0, 10 ** rng.randint(1, 9))}}}"
    return {"regex": text}


def _regex_nested(rng: random.Random) -> Json:
    depth = rng.randint(10, 20_000)
    closing = ")" * (depth if rng.random() < 0.7 else depth - 1)
    return {"regex": "(" * depth + "a" + closing + rng.choice(["", "*", "{3}"])}


def _schema_of_counts(rng: random.Random) -> Json:
    schema: Json = {"type": rng.choice(["integer", "string", "null"])}
    for _ in range(rng.randint(1, 4)):
        count = rng.randint(0, 10 ** rng.randint(1, 10))
        keyword = rng.choice(["minItems", "maxItems", "minContains", "maxContains"])
        schema = {"type": "array", "items": schema, keyword: count}
    return {"json": schema}


def _schema_of_lengths(rng: random.Random) -> Json:
    low = rng.randint(0, 10 ** rng.randint(1, 10))
    highs = range(low, low + rng.randint(1, 60))
    ranges = [{"type": "string", "minLength": low, "maxLength": high} for high in highs]
    return {"json": {"anyOf": ranges}}


def _schema_nested(rng: random.Random) -> Json:
    depth = rng.randint(10, 8_000)
    start, end = rng.choice(
        [('{"properties":{"a":', "}}"), ('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"not":', "}")]
    )
    return {"json": start * depth + "{}" + end * depth}


def _schema_of_references(rng: random.Random) -> Json:
    names = [f"d{number}" for number in range(rng.randint(1, 200))]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{rng.choice([*names, 'none'])}"} for _ in range(3)]}
        for name in names
    }
    return {"json": {"$ref": f"#/$defs/{names[0]}", "$defs": definitions}}


_KEYWORDS = (
    *("type", "properties", "required", "items", "prefixItems", "enum", "const", "$ref", "$defs"),
    *("anyOf", "allOf", "oneOf", "not", "minimum", "maximum", "multipleOf", "minLength"),
    *("maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems"),
    *("additionalProperties", "patternProperties", "propertyNames", "dependentRequired"),
    *("if", "then"),
)


def _schema_of_wrong_types(rng: random.Random) -> Json:
    return {"json": {name: value(rng) for name in rng.sample(_KEYWORDS, rng.randint(1, 8))}}


def _schema_of_contradictions(rng: random.Random) -> Json:
    low = rng.uniform(-1e6, 1e6)
    number = {"type": "number", "minimum": low, "exclusiveMaximum": low - rng.choice([0, 1])}
    return {"json": {"allOf": [number, {"type": rng.choice(["string", "integer"])}]}}


def _schema_of_members(rng: random.Random) -> Json:
    names = [f"member{number}" for number in range(rng.randint(10, 400))]
    members = {name: {"pattern": "(a|b){1,40}"} for name in names}
    return {"json": {"type": "object", "properties": members, "minProperties": len(names) // 2}}


def _choices(rng: random.Random) -> Json:
    odd = ["", " ", "\0", HALF_A_PAIR, LONG, "same", "same"]
    many = [f"choice {number}" for number in range(rng.randint(0, 9000))]
    return {"choice": rng.choice([[], many, odd, odd[:3], [1, 2], "text", {"a": 1}])}


def _grammar_of_rules(rng: random.Random) -> Json:
    count = rng.randint(2, 5000)
    rules = [
        f'r{number} ::= "{rng.choice("ab")}" r{rng.randrange(count)} | r{rng.randrange(count)}'
        for number in range(count)
    ]
    return {"grammar": "\n".join(["root ::= r0", *rules])}


def _grammar_of_growth(rng: random.Random) -> Json:
    depth = rng.randint(3, 25)
    rules = [f"r{number} ::= " + f"r{number + 1} " * 3 for number in range(depth)]
    return {"grammar": "\n".join(["root ::= r0", *rules, f'r{depth} ::= "a"'])}


def _structural_tag(rng: random.Random) -> Json:
    schema = rng.choice([_schema_of_counts, _schema_of_wrong_types])(rng)["json"]
    structure = {"begin": rng.choice(["<a>", "", LONG]), "schema": schema, "end": "</a>"}
    tag = {"structures": [structure], "triggers": rng.choice([["<a"], [], ["none"]])}
    return {"structural_tag": rng.choice([json.dumps(tag), "no tag", "{}", "[" * 5000])}


def _tag_of_wide_parts(rng: random.Random) -> Json:
    """Each part may end at almost any character, and the next one may begin there."""

    def part(depth: int) -> Json:
        pattern = rng.choice((r"[^\n]", "[^x]", r"[\s\S]", "[a-z ]", ".")) + rng.choice("*+")
        makers: list[Callable[[], Json]] = [lambda: {"type": "regex", "pattern": pattern}]
        if depth:
            makers += [
                lambda: {"type": "sequence", "elements": [part(depth - 1) for _ in range(8)]},
                lambda: {"type": rng.choice(("star", "plus")), "content": part(depth - 1)},
                lambda: {"type": "repeat", "min": 0, "max": 100, "content": part(depth - 1)},
            ]
        return rng.choice(makers)()

    return {"structural_tag": json.dumps({"type": "structural_tag", "format": part(2)})}


_NOISE = "ab()[]{}*+?|\\^$.-,0123456789é\u2028" + HALF_A_PAIR
_ASSERTIONS = [r"(?=a)b", r"(?<!x)y", r"(a)\1", r"a\bb", r"^$^$", r"[^\s\S]"]
_GRAMMAR_NOISE = ["root", "::=", '"a"', "|", "(", ")", "*", "\n", "start:", "r", "[a-", "/x/", "%"]
_GRAMMAR_NOISE += [r"\'", r"\?", r"\x41", r"\ud83d\ude00", r"\ude00", r"\U0001f600", r"\q"]
_KINDS = ("regex", "json", "choice", "grammar", "structural_tag", "json_object", "unknown")

_FORMATS: dict[str, Make] = {
    "regex: counts": _regex_of_counts,
    "regex: exponential": lambda rng: {
        "regex": f"({rng.choice(['a|b', '.', 'x|xx'])})*a(a|b){{{rng.randint(10, 60)}}}"
    },
    "regex: options": lambda rng: {"regex": f"({rng.choice('abc')}?)" * rng.randint(100, 30_000)},
    "regex: noise": lambda rng: {"regex": "".join(rng.choices(_NOISE, k=rng.randint(1, 300)))},
    "regex: nesting": _regex_nested,
    "regex: assertions": lambda rng: {"regex": rng.choice(_ASSERTIONS)},
    "schema: counts": _schema_of_counts,
    "schema: lengths": _schema_of_lengths,
    "schema: nesting": _schema_nested,
    "schema: references": _schema_of_references,
    "schema: wrong types": _schema_of_wrong_types,
    "schema: contradictions": _schema_of_contradictions,
    "schema: values": lambda rng: {
        "json": {
            "enum": [
                "".join(rng.choices(string.ascii_letters, k=12))
                for _ in range(rng.randint(1, 9000))
            ]
        }
    },
    "schema: members": _schema_of_members,
    "choices": _choices,
    "grammar: rules": _grammar_of_rules,
    "grammar: growth": _grammar_of_growth,
    "grammar: noise": lambda rng: {
        "grammar": " ".join(rng.choices(_GRAMMAR_NOISE, k=rng.randint(1, 200)))
    },
    "structural tag": _structural_tag,
    "structural tag: wide parts": _tag_of_wide_parts,
    "wrong shape": lambda rng: {kind: value(rng) for kind in rng.sample(_KINDS, rng.randint(0, 2))},
}


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
