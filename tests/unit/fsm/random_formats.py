"""Random formats of every kind: as a server gets them, nested, and odd."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.unit.fsm import schema_fuzz
from tests.unit.fsm.user_grammars import GRAMMARS, random_grammar

KINDS = ("structural_tag", "structural_tag", "json", "regex", "grammar", "choice")

WORDS = ("a", "ab", "<", "</", "<t>", "</t>", "é", "\n", " ", "```", '"', "\\", "😀", "x" * 40)
SETS = (".", r"[^\n]", r"[\s\S]", "[a-z]", "[^a]", r"\d", r"\w", r"\s", "é", "[^é<]", "[^x-z\\\\]")
COUNTS = ("", "", "*", "+", "?", "{2}", "{0,3}", "{1,}", "{3,40}")


def random_spec(rng: random.Random) -> tuple[str, str]:
    """A kind of constraint, by its name in `structured_outputs`, and what is asked for."""
    kind = rng.choice(KINDS)
    match kind:
        case "json":
            return kind, json.dumps(random_schema(rng))
        case "regex":
            return kind, random_pattern(rng)
        case "grammar":
            return kind, random_ebnf(rng)
        case "choice":
            return kind, json.dumps([_text(rng) for _ in range(rng.randint(1, 6))])
    return kind, json.dumps({"type": "structural_tag", "format": random_format(rng, 4)})


def random_schema(rng: random.Random) -> Any:
    if rng.random() < 0.5:
        return schema_fuzz.Generator(rng).schema()
    simple = [
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 90)},
        {"type": "string", "pattern": random_pattern(rng)},
        {"type": "array", "items": {"type": rng.choice(("string", "number", "null"))}},
        {"type": "object", "additionalProperties": True},
        {"enum": [_text(rng), rng.randint(-5, 500), None, [True, {}]]},
        {"type": "integer", "minimum": rng.randint(-900, 9), "maximum": rng.randint(9, 9000)},
        {"type": "string", "format": rng.choice(("date-time", "uuid", "email", "ipv4", "uri"))},
        True,
    ]
    names = rng.sample(("a", "ab", "b c", "é", "😀"), rng.randint(0, 3))
    return rng.choice(
        [
            *simple,
            {
                "type": "object",
                "properties": {name: rng.choice(simple) for name in names},
                "required": names[:2],
                "additionalProperties": rng.choice([False, *simple]),
            },
        ]
    )


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    """Most of it may end anywhere."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(SETS)
        if depth and rng.random() < 0.3:
            part = f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
        parts.append(part + rng.choice(COUNTS))
    return "".join(parts)


def random_ebnf(rng: random.Random) -> str:
    return rng.choice((random_grammar(rng), random_grammar(rng), rng.choice([*GRAMMARS.values()])))


def random_format(rng: random.Random, depth: int) -> dict[str, Any]:
    """A format of a structural tag, nested at most so deep."""
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "regex", "pattern": random_pattern(rng)},
        lambda: {"type": "regex", "pattern": random_pattern(rng, 0)},
        lambda: {"type": "const_string", "value": rng.choice(WORDS)},
        lambda: {"type": "any_text", **_excludes(rng)},
        lambda: {"type": "json_schema", "json_schema": random_schema(rng)},
        lambda: {"type": "grammar", "grammar": random_ebnf(rng)},
    ]
    if depth:

        def inner() -> dict[str, Any]:
            return random_format(rng, depth - 1)

        nested: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "sequence", "elements": [inner() for _ in range(rng.randint(1, 4))]},
            lambda: {"type": "or", "elements": [inner() for _ in range(rng.randint(1, 3))]},
            lambda: {"type": rng.choice(("star", "plus", "optional")), "content": inner()},
            lambda: {**_repeat(rng), "content": inner()},
            lambda: _tag(rng, inner()),
            lambda: _tags_with_separator(rng, inner),
            lambda: _triggered_tags(rng, inner),
        ]
        makers = makers[:3] + 2 * nested
    return rng.choice(makers)()


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 3)))


def _excludes(rng: random.Random) -> dict[str, list[str]]:
    return {"excludes": rng.sample(WORDS, rng.randint(1, 2))} if rng.random() < 0.4 else {}


def _some(rng: random.Random, *names: str) -> dict[str, bool]:
    return {name: True for name in names if rng.random() < 0.3}


def _repeat(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "repeat", "min": low, "max": rng.choice((-1, low, low + 2, 30))}


def _tag(rng: random.Random, content: dict[str, Any], begin: str = "") -> dict[str, Any]:
    ends = [rng.choice(WORDS) for _ in range(rng.randint(1, 2))]
    return {
        "type": "tag",
        "begin": begin or rng.choice(WORDS),
        "content": content,
        "end": ends[0] if rng.random() < 0.6 else ends,
    }


def _tags_with_separator(rng: random.Random, inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(rng, inner()) for _ in range(rng.randint(1, 3))],
        "separator": rng.choice(("", ", ", "\n", "ab")),
        **_some(rng, "at_least_one", "stop_after_first"),
    }


def _triggered_tags(rng: random.Random, inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    triggers = rng.sample(("<t", "[", "```", "é"), rng.randint(1, 2))
    tags = [
        _tag(rng, inner(), trigger + rng.choice(("", ">", "x>", "\n")))
        for trigger in triggers
        for _ in range(rng.randint(1, 2))
    ]
    options = _some(rng, "at_least_one", "stop_after_first")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        **options,
        **_excludes(rng),
    }
