"""Odd requests to every entry point, at random: formats, hints, fields, headers, tools, bodies.

Owns what is sent, not how. Pure: the same seed gives the same requests. Most are nearly right,
because what is plainly wrong is refused before it gets far. Each is small and cheap: formats are
short ones or those that the automata take. For some others, xgrammar takes minutes to make a
bitmask, in stock vLLM too, and all requests wait for it.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any  # Any: JSON

from tests.unit.fsm.format_fuzz import REFUSALS, compiled
from tests.unit.fsm.random_formats import random_format, random_schema, random_spec
from tools.attack import hostile
from tools.attack.hostile import HINTS, TEXTS, Attack, Json, Phase, attack, chat, completion, value

FIELDS = (
    "odd",
    *("cache_salt", "request_id", "priority", "user", "stop", "stop_token_ids", "bad_words"),
    *("logit_bias", "allowed_token_ids", "min_tokens", "max_tokens", "n", "seed", "temperature"),
    *("top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "logprobs", "echo"),
    *("prompt_logprobs", "truncate_prompt_tokens", "skip_special_tokens", "ignore_eos", "suffix"),
    *("include_stop_str_in_output", "stream", "stream_options", "return_token_ids", "best_of"),
    *("kv_transfer_params", "vllm_xargs", "response_format", "structured_outputs", "prompt"),
    *("spaces_between_special_tokens", "return_tokens_as_token_ids", "add_special_tokens", "model"),
)
SHORT = 40
"""Characters of a format that may go to vLLM's backends."""


def phases(share: float, seed: int) -> list[Phase]:
    """All requests of an attack, in order, or a share of them."""
    rng = random.Random(seed)

    def some(count: int) -> int:
        return round(count * share)

    return [
        Phase("formats", [*hostile.formats(rng, some(500))], 4, may_fail=True),
        Phase("mixed, half cut off", [*hostile.mixed(rng, some(1000))], 8),
        Phase("unreadable bodies", [*hostile.unreadable()], 4),
        Phase("odd requests", [*odd_requests(rng, some(5000))], 24),
        Phase("pins", [*hostile.pins(rng, some(300))], 8),
        Phase("batches", [*hostile.batches(rng, 1 + some(7), 1 + some(999))], 1),
        Phase("scrapes", [*hostile.scrapes(some(1000))], 16),
    ]


def odd_requests(rng: random.Random, count: int) -> Iterator[Attack]:
    """`count` requests, of all kinds in turn."""
    makers: list[tuple[str, Callable[[random.Random], Attack]]] = [
        ("format", _format),
        ("format in a chat", _format_in_chat),
        ("format and fields", _format_and_fields),
        ("hints", _hints),
        ("fields", _fields),
        ("tools", _tools),
        ("headers", _headers),
        ("own routes", _own_route),
        ("questions", _question),
        ("broken body", _broken_body),
    ]
    for number in range(count):
        kind, make = makers[number % len(makers)]
        made = make(rng)
        yield Attack(f"{kind}: {made.kind}", made.path, made.body, made.headers, made.method)


def _is_cheap(kind: str, spec: str) -> bool:
    with contextlib.suppress(*REFUSALS):
        compiled(kind, spec, by_spec=True)
        return True
    return len(spec) < SHORT and kind != "structural_tag"


def _tag(rng: random.Random) -> Json:
    while True:
        tag: Json = {"type": "structural_tag", "format": random_format(rng, 3)}
        if _is_cheap("structural_tag", json.dumps(tag)):
            return tag


def _structured(rng: random.Random) -> tuple[str, Json]:
    kind, spec = random_spec(rng)
    while not _is_cheap(kind, spec):
        kind, spec = random_spec(rng)
    if kind in ("choice", "json") and rng.random() < 0.7:
        return kind, {kind: json.loads(spec)}
    return kind, {kind: json.loads(spec) if kind == "choice" else spec}


def _format(rng: random.Random) -> Attack:
    kind, structured = _structured(rng)
    body = completion(structured_outputs=structured, max_tokens=rng.randint(1, 6))
    return attack(kind, "completions", body)


def _format_in_chat(rng: random.Random) -> Attack:
    makers: dict[str, Callable[[], Json]] = {
        "json_schema": lambda: {
            "type": "json_schema",
            "json_schema": {"name": rng.choice(TEXTS), "schema": random_schema(rng)},
        },
        "json_object": lambda: {"type": "json_object"},
        "structural_tag": lambda: _tag(rng),
        "odd": lambda: {"type": value(rng), "json_schema": value(rng)},
    }
    kind = rng.choice(list(makers))
    return attack(kind, "chat/completions", chat(response_format=makers[kind]()))


def _format_and_fields(rng: random.Random) -> Attack:
    kind, structured = _structured(rng)
    fields: Json = {
        "bad_words": [rng.choice(TEXTS)],
        "logit_bias": {str(rng.randrange(4_000)): rng.choice((-100, 100, 5))},
        "stop_token_ids": [rng.randrange(-2, 4_100) for _ in range(3)],
        "allowed_token_ids": [rng.randrange(4_000) for _ in range(20)],
        "min_tokens": rng.randint(0, 4),
        "prompt_logprobs": rng.choice((0, 1)),
        "logprobs": rng.choice((0, 2)),
        "n": rng.choice((1, 2)),
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
        "vllm_xargs": {"sgl_report": 1},
    }
    chosen = {name: fields[name] for name in rng.sample(list(fields), 3)}
    body = completion(structured_outputs=structured, **chosen)
    return attack(f"{kind}, {', '.join(sorted(chosen))}", "completions", body)


def _hints(rng: random.Random) -> Attack:
    plausible: Json = {
        "sgl_program": rng.choice(("p", "p2", rng.choice(TEXTS))),
        "sgl_fork_group": rng.choice((1, "f")),
        "sgl_ends": rng.choice((0, 1, 3, 2**70)),
        "sgl_next_tool": rng.choice(("search", rng.choice(TEXTS))),
        "sgl_next_in_s": rng.choice((0, 0.5, 86_400)),
        "sgl_score_from": rng.choice((0, 1, 2, 3, 9_999)),
    }
    chosen = rng.sample(HINTS, rng.randint(1, 4))
    given = {
        name: plausible[name] if name in plausible and rng.random() < 0.6 else value(rng)
        for name in chosen
    }
    fields: Json = {"prompt_logprobs": 0} if rng.random() < 0.4 else {}
    if rng.random() < 0.2:
        fields |= {"echo": True, "logprobs": 1}
    body = completion(vllm_xargs=given, cache_salt=rng.choice(("s", "t")), **fields)
    return attack(", ".join(sorted(chosen)), "completions", body)


def _fields(rng: random.Random) -> Attack:
    chosen = rng.sample(FIELDS, rng.randint(1, 3))
    path = rng.choice(("completions", "completions", "chat/completions", "responses"))
    fields = {name: value(rng) for name in chosen}
    body = chat(**fields) if path == "chat/completions" else completion(**fields)
    if path == "responses":
        body |= {"input": body.pop("prompt", "Hi")}
    # What a client may ask for in earnest would take the rest of the run.
    for name in ("max_tokens", "n", "best_of", "min_tokens"):
        if isinstance(number := body.get(name), int) and not isinstance(number, bool):
            body[name] = min(number, 4)
    return attack(", ".join(sorted(chosen)), path, body)


def _tools(rng: random.Random) -> Attack:
    tools = [
        {
            "type": "function",
            "function": {
                "name": rng.choice(("search", "f", *TEXTS[:8])),
                "parameters": random_schema(rng) if rng.random() < 0.8 else value(rng),
                "strict": rng.random() < 0.5,
            },
        }
        for _ in range(rng.randint(1, 3))
    ]
    named = {"type": "function", "function": {"name": "search"}}
    choice = rng.choice(("auto", "required", "none", named, value(rng)))
    body = chat(tools=tools, tool_choice=choice, parallel_tool_calls=rng.random() < 0.5)
    return attack(str(choice)[:20], "chat/completions", body)


def _headers(rng: random.Random) -> Attack:
    """Headers can hold what Latin-1 can, but for line ends and NUL."""
    plain = [text for text in TEXTS if text.isprintable() and text.isascii()]
    name = rng.choice(
        ("X-Request-Id", "X-Session-Id", "X-data-parallel-rank", "traceparent", "Origin", "Accept")
    )
    body = completion(request_id=rng.choice(TEXTS)) if rng.random() < 0.5 else completion()
    return attack(name, "completions", body, **{name: rng.choice(plain).strip()})


def _prompt(rng: random.Random) -> Any:
    return rng.choice(("Hi", [1, 2, 3], [2**31], [-1], [], "", value(rng)))


def _own_route(rng: random.Random) -> Attack:
    salts = rng.choice(({}, {"cache_salt": "s"}, {"cache_salt": value(rng)}))
    request = {
        "id": value(rng),
        "path": rng.choice(("completions", "chat/completions", value(rng))),
        "body": rng.choice((completion(max_tokens=1), value(rng))),
    }
    many = [_prompt(rng) for _ in range(rng.randint(0, 3))]
    bodies: dict[str, Any] = {
        "pin": {"prompt": _prompt(rng), **salts},
        "unpin": {"pin_id": value(rng)},
        "score": {"prompt": _prompt(rng), "continuations": many, **salts},
        "match": {"prompt": _prompt(rng), "candidates": many, **salts},
        "batch": {"requests": rng.choice(([request], [request] * 3, value(rng)))},
        "batch/abort": {"ids": value(rng)},
        "flush_cache": {},
    }
    path = rng.choice(list(bodies))
    body = bodies[path] if rng.random() < 0.8 else value(rng)
    return attack(path, f"sgl/{path}", body)


def _question(rng: random.Random) -> Attack:
    path = rng.choice(
        (
            *("/v1/sgl/stats", "/v1/sgl/tree", "/v1/sgl/pins", "/sgl/tree", "/metrics"),
            *("/v1/sgl/why", "/v1/sgl/why?request=x", "/v1/sgl/why?request=%00%ff"),
            *("/v1/sgl/tree?max_nodes=-1", "/v1/sgl/tree?max_nodes=x", "/v1/sgl/tree?text=1"),
            f"/v1/sgl/tree?max_nodes={rng.choice((0, 1, 2**64))}",
        )
    )
    return Attack(path, path, method=rng.choice(("GET", "GET", "GET", "PUT", "DELETE")))


def _broken_body(rng: random.Random) -> Attack:
    """A good body with some bytes changed, lost or twice."""
    _, structured = _structured(rng)
    body = completion(structured_outputs=structured, vllm_xargs={"sgl_program": "p", "sgl_ends": 1})
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 5)]
            case _:
                data[at:at] = data[at : at + rng.randint(1, 5)]
    path = rng.choice(("completions", "chat/completions", "sgl/score", "sgl/pin", "sgl/match"))
    return Attack(path, f"/v1/{path}", bytes(data))
