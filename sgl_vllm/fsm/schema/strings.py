"""Strings: `minLength`, `maxLength`, `pattern`, `format`, and these below `not`."""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.json_string import (
    COUNTED_STRING,
    NAME_STRING,
    STRING,
    JsonString,
    dfa_of_length,
)
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema.context import Context, of_valid, string
from sgl_vllm.fsm.schema.formats import FORMATS, UNSUPPORTED_FORMATS, format_dfa
from sgl_vllm.fsm.schema.keywords import Schema, several
from sgl_vllm.fsm.schema.values import limits, listings, quoted

_MAX_LENGTH_WITH_PATTERN = 1_100
_ANY_TEXT = r'"(?:[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*"'
_A_STRING: Schema = {"type": "string"}


def any_text() -> ByteDfa:
    """All strings of characters that patterns know (`characters.ANY`), each in one spelling, that
    of `NAME_STRING`."""
    return of_pattern(_ANY_TEXT)


def compile_string(context: Context, schema: dict[str, Any]) -> Expression:
    """The strings that are valid against `schema`."""
    low, high = _length(schema)
    if "pattern" in schema or "not" in schema or _formats(schema):
        unlisted = _only_unlisted(schema)
        if unlisted is None or high is not None:
            return of_valid(language(context, schema))
        return string(JsonString.of(NAME_STRING, 0, low, names=Names.of(unlisted)))
    body = STRING if low == 0 and high is None else COUNTED_STRING
    return string(JsonString.of(body, 0, low, high))


def language(context: Context, schema: dict[str, Any]) -> ByteDfa:
    """The strings that are valid against `schema`, among them each in the spelling of `any_text`.

    It reads what constrains strings, `enum` and `const` included, and does not follow references.
    """
    low, high = _length(schema)
    automata = [context.workspace.pattern(pattern) for pattern in several(schema, "pattern")]
    automata += [format_dfa(form) for form in _formats(schema)]
    if low or high is not None:
        automata.append(_of_length(low, high))
    for values in listings(schema):
        automata.append(context.workspace.texts([quoted(v) for v in values if isinstance(v, str)]))
    negated = several(schema, "not")
    if negated or not automata:
        automata.insert(0, any_text())
    dfa = automata[0]
    for other in automata[1:]:
        dfa = context.workspace.common(dfa, other)
    for other in negated:
        dfa = context.workspace.common(dfa, language(context, other), minus=True)
    return dfa


def names(context: Context, schema: Schema) -> ByteDfa:
    """The strings that are valid against any schema, each in the spelling of `any_text`."""
    found = context.both(_A_STRING, schema)
    if not isinstance(found, dict):
        return any_text() if found else context.workspace.texts(())
    branches = context.alternatives.of(found)
    if branches is None:
        return context.workspace.common(any_text(), language(context, found))
    outside = any_text()
    for branch in branches:
        outside = context.workspace.common(outside, names(context, branch), minus=True)
    return context.workspace.common(any_text(), outside, minus=True)


def _length(schema: dict[str, Any]) -> tuple[int, int | None]:
    low, high = limits(schema, "minLength", "maxLength")
    if high is not None and high < low:
        raise NothingValidError("minLength is above maxLength")
    return low, high


def _of_length(low: int, high: int | None) -> ByteDfa:
    if max(low, high or 0) > _MAX_LENGTH_WITH_PATTERN:
        raise UnsupportedSchemaError(f"a pattern with a length above {_MAX_LENGTH_WITH_PATTERN}")
    return dfa_of_length(low, high)


def _formats(schema: dict[str, Any]) -> list[str]:
    """The formats that constrain strings."""
    found = several(schema, "format")
    for form in found:
        if form in UNSUPPORTED_FORMATS:
            raise UnsupportedSchemaError(f"format {form!r} is not supported")
    return [form for form in found if form in FORMATS]


def _only_unlisted(schema: dict[str, Any]) -> list[bytes] | None:
    """The strings below `not`, inside their quotes, if nothing but these is excluded."""
    if "pattern" in schema or _formats(schema):
        return None
    found: list[str] = []
    for other in several(schema, "not"):
        if other.keys() != {"type", "enum"}:
            return None
        found += other["enum"]
    return [quoted(value)[1:-1] for value in found]
