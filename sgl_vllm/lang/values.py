"""Types where people have them: what `gen` and `select` take, as constraint and as reader.

Owns the way from a Python type (dtype, pydantic model, dataclass, TypedDict, Enum, a term of
`outlines.types`) to the constraint that the server is sent and to the function that reads the
generated text as a value. Knows nothing of programs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias

DType: TypeAlias = type | Literal["int", "float", "str", "bool"]
JsonSchema: TypeAlias = Mapping[str, Any] | str | type
Regex: TypeAlias = Any
"""A pattern as a string, or a term of `outlines.types`."""

Reader: TypeAlias = Callable[[str], object]
"""Gives the value of a generated text; ValueError for a text that has not the wanted form."""

# Digits are bounded so that a generation always comes to its end.
_INT_REGEX = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT_REGEX = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"
_BOOL_REGEX = r"(True|False)"
_STR_REGEX = r'"([^"\\\n\r\t]|\\["\\/bfnrt])*"'


def _read_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"


def _read_str(text: str) -> str:
    value = json.loads(text, strict=False)  # control characters are none of JSON's, but of str's
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is not a quoted string")
    return value


_DTYPES: dict[str, tuple[str, Reader]] = {
    "int": (_INT_REGEX, int),
    "float": (_FLOAT_REGEX, float),
    "bool": (_BOOL_REGEX, _read_bool),
    "str": (_STR_REGEX, _read_str),
}


def regex_and_reader_of(dtype: DType) -> tuple[str, Reader]:
    """The literals of int, float, str (in double quotes) or bool. ValueError for other types."""
    name = dtype if isinstance(dtype, str) else dtype.__name__
    if name not in _DTYPES:
        raise ValueError(f"dtype must be int, float, str or bool, not {name}")
    return _DTYPES[name]


def regex_of(regex: Regex) -> str:
    """A pattern as text. ValueError for what is neither a string nor a term of outlines."""
    if isinstance(regex, str):
        return regex
    if type(regex).__module__.startswith("outlines."):
        from outlines.types.dsl import to_regex  # type: ignore[import-not-found, unused-ignore]

        return str(to_regex(regex))
    raise ValueError(
        f"regex must be a string or a term of outlines.types, not {type(regex).__name__}"
    )


def schema_and_reader_of(schema: JsonSchema) -> tuple[str, Reader | None]:
    """A JSON schema as text and, for a Python type, what makes an instance of it.

    Takes a dict, JSON text, a pydantic model class, a dataclass or a TypedDict; that must be the
    one of typing_extensions before Python 3.12 (pydantic says so).
    """
    if isinstance(schema, str):
        return schema, None
    if isinstance(schema, Mapping):
        return json.dumps(schema), None
    model: Any = schema
    if hasattr(model, "model_json_schema"):
        return json.dumps(model.model_json_schema()), model.model_validate_json
    from typing_extensions import is_typeddict  # knows its own, and those of typing

    if dataclasses.is_dataclass(schema) or is_typeddict(schema):
        from pydantic import TypeAdapter

        adapter: TypeAdapter[Any] = TypeAdapter(schema)
        return json.dumps(adapter.json_schema()), adapter.validate_json
    raise ValueError(
        "json_schema must be a dict, a JSON string, or a class: a pydantic model, a dataclass or "
        "a TypedDict"
    )


def choices_of(choices: Sequence[str] | type[Enum] | None) -> tuple[tuple[str, ...], Reader | None]:
    """The texts to choose from and, for an Enum, what makes a text its member.

    The texts of an Enum are its values, which must be strings.
    """
    if isinstance(choices, type) and issubclass(choices, Enum):
        texts: tuple[Any, ...] = tuple(member.value for member in choices)
        reader: Reader | None = choices
    elif isinstance(choices, str) or not choices:
        raise ValueError("select needs a non-empty list of choices")
    else:
        texts, reader = tuple(choices), None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("every choice of a select must be a non-empty string")
    return texts, reader
