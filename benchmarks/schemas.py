"""JSON schemas with instances that fit them and that do not: MaskBench's, or made-up ones.

Owns the file's format. Pure: no vLLM, no tokenizer. The made-up ones, in `schemas.jsonl`, are of
the kinds that MaskBench has: records with required and optional fields, enumerations, bounds,
patterns, dates, lists, nested records, alternatives, references.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "maskbench_dev.jsonl.gz"
MADE_UP = Path(__file__).with_name("schemas.jsonl")


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
    """Those of the folder `data`, which is to hold `FILE`, or the made-up ones.

    Raises ValueError if the file is not there or is not what it should be.
    """
    if data is None:
        return load(MADE_UP)
    try:
        return load(data / FILE)
    except (OSError, EOFError) as error:
        raise ValueError(f"--data: cannot read {data / FILE}: {error}") from error


def load(file: Path) -> tuple[Schema, ...]:
    """The schemas of a file in MaskBench's format: a JSON object a line, also gzip-compressed."""
    loaded = []
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
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


def plain_schemas(data: Path | None, max_characters: int) -> list[Schema]:
    """Those of `schemas` that are plain and not longer."""
    return [
        one
        for one in schemas(data)
        if len(one.text) <= max_characters and is_plain(json.loads(one.text))
    ]


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
