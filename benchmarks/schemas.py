"""JSON schemas with instances that fit them and that do not: MaskBench's, or made-up ones.

Owns the file's format and the generator. Pure: no vLLM, no tokenizer. The same number and seed
give the same schemas.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

FILE = "maskbench_dev.jsonl.gz"
NUM_GENERATED = 40


@dataclass(frozen=True)
class Instance:
    """A JSON text, and whether it is what its schema asks for."""

    text: str
    valid: bool


@dataclass(frozen=True)
class Schema:
    """A JSON schema as text, with instances of both kinds; it may have none."""

    name: str
    text: str
    instances: tuple[Instance, ...]


def schemas(data: Path | None) -> tuple[Schema, ...]:
    """Those of the folder `data`, which is to hold `FILE`, or 40 made-up ones.

    Raises ValueError if the file is not there or is not what it should be.
    """
    if data is None:
        return generated()
    try:
        return load(data / FILE)
    except (OSError, EOFError) as error:
        raise ValueError(f"--data: cannot read {data / FILE}: {error}") from error


def load(file: Path) -> tuple[Schema, ...]:
    """The schemas of a file in MaskBench's format: a JSON object a line, gzip-compressed."""
    loaded = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = json.loads(line)
                instances = tuple(
                    _instance(test["data"], bool(test["valid"])) for test in content["tests"]
                )
                loaded.append(Schema(content["name"], json.dumps(content["schema"]), instances))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: {error!r}") from error
    return tuple(loaded)


def _instance(data: Any, valid: bool) -> Instance:
    return Instance(json.dumps(data, ensure_ascii=False), valid)


# -- what any backend can take

# vLLM 0.32 refuses a schema with one of these, or hands it to another backend than xgrammar, or
# some backend does not observe it.
_HARD_KEYWORDS = frozenset(
    "additionalItems allOf contains dependencies dependentRequired dependentSchemas else if "  # noqa: SIM905
    "maxContains maxProperties minContains minProperties multipleOf not oneOf patternProperties "
    "propertyNames then unevaluatedItems unevaluatedProperties uniqueItems".split()
)
_EASY_FORMATS = frozenset(
    ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname")
)
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_NO_SCHEMAS = ("enum", "const", "default", "example", "examples", "required")


def is_plain(schema: Any) -> bool:
    """Whether every one of vLLM's backends is expected to take the schema and to observe all of
    it: records, lists, enumerations, bounds, patterns, alternatives, references within it."""
    if isinstance(schema, list):
        return all(map(is_plain, schema))
    if not isinstance(schema, dict):
        return True
    if not _HARD_KEYWORDS.isdisjoint(schema):
        return False
    if not schema.get("$ref", "#/").startswith("#/"):
        return False
    if "format" in schema and schema["format"] not in _EASY_FORMATS:
        return False
    if not {"pattern", "format"}.isdisjoint(schema) and not {"minLength", "maxLength"}.isdisjoint(
        schema
    ):
        return False
    for keyword, value in schema.items():
        inner = list(value.values()) if keyword in _SCHEMAS_BY_NAME else value
        if keyword not in _NO_SCHEMAS and not is_plain(inner):
            return False
    return True


# -- made-up ones


@dataclass(frozen=True)
class _Made:
    """A schema, a value that fits it, and one that does not."""

    schema: dict[str, Any]
    valid: Any
    invalid: Any


_Kind: TypeAlias = Callable[[random.Random, int], _Made]

_WORDS = (  # noqa: SIM905
    "account address amount author bridge city colour count country currency depth device email "
    "enabled engine height island label language length level limit mode name note number order "
    "owner path price query range rate region river score size source state status street tag "
    "target title token town unit user value version weight width year zone"
).split()


def generated(count: int = NUM_GENERATED, seed: int = 0) -> tuple[Schema, ...]:
    """Made-up schemas of the kinds that MaskBench has: records with required and optional fields,
    enumerations, bounds, patterns, dates, lists, nested records, alternatives, references."""
    return tuple(_schema(number, random.Random(f"{seed}/{number}")) for number in range(count))


def _schema(number: int, rng: random.Random) -> Schema:
    # Each kind of field is the first of some schema, so that a few schemas show them all.
    made = _object(rng, 2, first=_KINDS[number % len(_KINDS)])
    schema = made.schema
    if number % 5 == 4:  # the record stands behind a reference
        schema = {
            "type": "object",
            "properties": {"record": {"$ref": "#/$defs/record"}},
            "required": ["record"],
            "additionalProperties": False,
            "$defs": {"record": schema},
        }
        made = _Made(schema, {"record": made.valid}, {"record": made.invalid})
    without_one = json.loads(json.dumps(made.valid))
    record = without_one.get("record", without_one)
    record.pop(next(iter(record)))
    instances = (
        _instance(made.valid, True),
        _instance(made.invalid, False),
        _instance(without_one, False),
        _instance([made.valid], False),
    )
    return Schema(f"generated_{number}", json.dumps(schema), instances)


def _object(rng: random.Random, depth: int, first: _Kind | None = None) -> _Made:
    """A record of which the first field is required, and is the one that does not fit."""
    names = rng.sample(_WORDS, rng.randint(2, 6))
    kinds = [first or rng.choice(_KINDS), *rng.choices(_KINDS, k=len(names) - 1)]
    fields = {name: kind(rng, depth - 1) for name, kind in zip(names, kinds, strict=True)}
    optional = {name for name in names[1:] if rng.random() < 0.3}
    left_out = {name for name in optional if rng.random() < 0.5}
    schema = {
        "type": "object",
        "properties": {name: field.schema for name, field in fields.items()},
        "required": [name for name in names if name not in optional],
        "additionalProperties": False,
    }
    valid = {name: field.valid for name, field in fields.items() if name not in left_out}
    return _Made(schema, valid, {**valid, names[0]: fields[names[0]].invalid})


def _nested(rng: random.Random, depth: int) -> _Made:
    return _object(rng, depth) if depth > 0 else _string(rng, depth)


def _string(rng: random.Random, depth: int) -> _Made:
    text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 6)))
    return _Made({"type": "string"}, rng.choice((text, f"„{text}“ – 100 %", "")), 7)


def _short_string(rng: random.Random, depth: int) -> _Made:
    bound = rng.randint(3, 12)
    schema = {"type": "string", "minLength": 1, "maxLength": bound}
    return _Made(schema, "x" * rng.randint(1, bound), "x" * (bound + 1))


def _choice(rng: random.Random, depth: int) -> _Made:
    choices = rng.sample(_WORDS, rng.randint(2, 8))
    return _Made({"type": "string", "enum": choices}, choices[-1], choices[0] + "x")


def _pattern(rng: random.Random, depth: int) -> _Made:
    digits = rng.randint(2, 4)
    schema = {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{digits}}}$"}
    return _Made(schema, "AB-" + "7" * digits, "AB-" + "7" * (digits - 1))


def _date(rng: random.Random, depth: int) -> _Made:
    return _Made({"type": "string", "format": "date"}, "2024-02-29", "yesterday")


def _integer(rng: random.Random, depth: int) -> _Made:
    return _Made({"type": "integer"}, rng.randint(-(10**6), 10**6), 1.5)


def _bounded_integer(rng: random.Random, depth: int) -> _Made:
    low, high = rng.randint(0, 20), rng.randint(30, 5000)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return _Made(schema, rng.randint(low, high), high + 1)


def _number(rng: random.Random, depth: int) -> _Made:
    return _Made({"type": "number"}, round(rng.uniform(-1000, 1000), 3), "1.5")


def _boolean(rng: random.Random, depth: int) -> _Made:
    return _Made({"type": "boolean"}, rng.random() < 0.5, "true")


def _or_null(rng: random.Random, depth: int) -> _Made:
    inner = rng.choice((_integer, _choice))(rng, depth)
    schema = {"anyOf": [inner.schema, {"type": "null"}]}
    return _Made(schema, rng.choice((None, inner.valid)), inner.invalid)


def _list(rng: random.Random, depth: int) -> _Made:
    inner = rng.choice((_string, _choice, _number, _nested))(rng, depth)
    most = rng.randint(2, 4)
    schema = {"type": "array", "items": inner.schema, "minItems": 1, "maxItems": most}
    return _Made(schema, [inner.valid] * rng.randint(1, most), [inner.valid, inner.invalid])


_KINDS: tuple[_Kind, ...] = (
    _string,
    _choice,
    _integer,
    _nested,
    _list,
    _boolean,
    _number,
    _or_null,
    _short_string,
    _bounded_integer,
    _pattern,
    _date,
)
