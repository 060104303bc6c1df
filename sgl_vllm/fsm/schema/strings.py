"""Strings: `minLength`, `maxLength`, `pattern`, `format`."""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.json_string import COUNTED_STRING, PLAIN_STRING, STRING, JsonString
from sgl_vllm.fsm.rust_regex import compile_trusted, compile_untrusted
from sgl_vllm.fsm.schema.context import Context, all_of, string
from sgl_vllm.fsm.schema.formats import FORMATS, UNSUPPORTED_FORMATS
from sgl_vllm.fsm.schema.values import limits

_MAX_LENGTH_WITH_PATTERN = 300
_CHARACTER = r'(?:[^"\\\x{0}-\x{1f}]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})'


def compile_string(context: Context, schema: dict[str, Any]) -> Expression:
    """The strings that are valid against `schema`."""
    low, high = limits(schema, "minLength", "maxLength")
    if high is not None and high < low:
        raise UnsupportedSchemaError("minLength is above maxLength")
    is_bounded = bool(low) or high is not None
    automata: list[ByteDfa] = []
    if "pattern" in schema:
        automata.append(context.workspace.pattern(schema["pattern"]))
    form = schema.get("format")
    if form in FORMATS:
        automata.append(compile_trusted(f'"(?:{FORMATS[form]})"'))
    elif form in UNSUPPORTED_FORMATS:
        raise UnsupportedSchemaError(f"format {form!r} is not supported")
    if not automata:
        body = STRING
        if is_bounded:  # xgrammar allows no escapes in such strings
            body = PLAIN_STRING if context.is_strict else COUNTED_STRING
        return string(JsonString.of(body, 0, low, high))
    if is_bounded:
        if max(low, high or 0) > _MAX_LENGTH_WITH_PATTERN:
            raise UnsupportedSchemaError(
                f"a pattern with a length above {_MAX_LENGTH_WITH_PATTERN}"
            )
        most = "" if high is None else str(high)
        automata.append(compile_untrusted(f'"{_CHARACTER}{{{low},{most}}}"'))
    return all_of(automata)
