"""Constraints on generated text: what `gen` and `select` accept, and how it is read back.

Owns the constraint kinds, declared once, and the way from a Python type (dtype, pydantic model,
dataclass, TypedDict, Enum, a term of `outlines.types`) to a constraint and a reader. Which kinds a
service supports is up to its backend.

To add a kind: declare it here with a function from its argument to a `Constraint`, add it to
`ARGUMENTS`, and add the argument to `api.gen`. Backends for vLLM send it as it is; the others
refuse a kind they do not know.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar  # Any: a user's JSON schema

from sgl_vllm.lang.python_patterns import rewritten
from sgl_vllm.lang.text import check_unicode

T = TypeVar("T")

DType: TypeAlias = type[T] | Literal["int", "float", "str", "bool"]
JsonSchema: TypeAlias = Mapping[str, object] | str | type[T]
Regex: TypeAlias = object
"""A pattern as a string, or a term of `outlines.types`."""

Choices: TypeAlias = Sequence[str] | type[T]

Parser: TypeAlias = Callable[[str], object]
"""Parses generated text into a value. Raises ValueError for text of the wrong form."""


@dataclass(frozen=True)
class ConstraintKind:
    """A kind of constraint: its name in `gen`, and its key in vLLM's `structured_outputs`.

    `shown` names it in error messages. With `is_json` the constraint's text is a JSON document.
    """

    name: str
    vllm_key: str
    shown: str
    is_json: bool = False


REGEX = ConstraintKind("regex", "regex", "regex (or dtype)")
JSON_SCHEMA = ConstraintKind("json_schema", "json", "json_schema", is_json=True)


@dataclass(frozen=True)
class Constraint:
    """What a generated text must match, entirely: for example a pattern, or a schema as text."""

    kind: ConstraintKind
    text: str

    @property
    def value(self) -> Any:  # whatever JSON the user's schema is
        """The constraint as vLLM's HTTP API takes it: text, or the parsed JSON document."""
        return json.loads(self.text) if self.kind.is_json else self.text


def only_one_of(arguments: Mapping[str, object]) -> str | None:
    """The name of the one argument that is set (not None), or None. ValueError for several."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"gen takes only one of {' and '.join(given)}")
    return given[0] if given else None


# --- dtype ---------------------------------------------------------------------------------------

# The number of digits is bounded so that a generation always ends.
_INT_REGEX = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT_REGEX = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"
_BOOL_REGEX = r"(True|False)"
_STR_REGEX = r'"([^"\\\n\r\t]|\\["\\/bfnrt])*"'


def _read_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"


def _read_str(text: str) -> str:
    value = json.loads(text, strict=False)  # the regex allows control characters, JSON does not
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is not a quoted string")
    return value


_DTYPES: dict[str, tuple[str, Parser]] = {
    "int": (_INT_REGEX, int),
    "float": (_FLOAT_REGEX, float),
    "bool": (_BOOL_REGEX, _read_bool),
    "str": (_STR_REGEX, _read_str),
}


def dtype_constraint(dtype: DType) -> tuple[Constraint, Parser]:
    """Literals of int, float, str (in double quotes) or bool. ValueError for other types."""
    name = dtype if isinstance(dtype, str) else dtype.__name__
    if name not in _DTYPES:
        raise ValueError(f"dtype must be int, float, str or bool, not {name}")
    pattern, reader = _DTYPES[name]
    return Constraint(REGEX, pattern), reader


# --- regex and JSON schema -----------------------------------------------------------------------


def regex_constraint(regex: Regex) -> tuple[Constraint, None]:
    """A pattern of Python's, which may also be an outlines term. ValueError for anything else, and
    for a pattern that is not regular."""
    if type(regex).__module__.startswith("outlines."):
        from outlines.types.dsl import to_regex  # type: ignore[import-not-found, unused-ignore]

        regex = str(to_regex(regex))
    if not isinstance(regex, str):
        raise ValueError(
            f"regex must be a string or a term of outlines.types, not {type(regex).__name__}"
        )
    return Constraint(REGEX, rewritten(regex)), None


def schema_constraint(schema: JsonSchema) -> tuple[Constraint, Parser | None]:
    """A JSON schema and, for a Python type, the reader that makes an instance of it.

    Accepts a dict, JSON text, a pydantic model class, a dataclass or a TypedDict. Before Python
    3.12, pydantic requires the TypedDict of typing_extensions.
    """
    if isinstance(schema, str | Mapping):
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            is_schema = isinstance(json.loads(text), dict | bool)
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema is not valid JSON ({error}): {schema!r}") from None
        if not is_schema:
            raise ValueError(f"json_schema must be a JSON object, not {schema!r}")
        return Constraint(JSON_SCHEMA, text), None
    model: Any = schema  # a class with pydantic's methods, if it has them
    if hasattr(model, "model_json_schema"):
        text = json.dumps(model.model_json_schema())
        return Constraint(JSON_SCHEMA, text), model.model_validate_json
    from typing_extensions import is_typeddict  # recognizes its own and those of typing

    if dataclasses.is_dataclass(schema) or is_typeddict(schema):
        from pydantic import TypeAdapter

        adapter: TypeAdapter[object] = TypeAdapter(schema)
        return Constraint(JSON_SCHEMA, json.dumps(adapter.json_schema())), adapter.validate_json
    raise ValueError(
        "json_schema must be a dict, a JSON string, or a class: a pydantic model, a dataclass or "
        "a TypedDict"
    )


def validated(schema: Constraint, parse: Parser | None) -> Parser:
    """A reader for ``validate=True``: raises ValueError for text that is not valid against the
    `schema`, and otherwise returns what `parse` makes of the text, or the text.

    As far as the `jsonschema` package knows them, formats are checked; patterns are Python's;
    references to other documents are errors. Cost: making the validator, a millisecond or so, once
    per schema. ValueError for a schema that is not valid itself, ImportError without `jsonschema`.
    """
    check = _checker(schema.text)

    def read(text: str) -> object:
        check(text)
        return text if parse is None else parse(text)

    return read


@lru_cache(maxsize=256)
def _checker(schema_text: str) -> Callable[[str], None]:
    try:
        from jsonschema import exceptions, validators
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise ImportError(
            "validate=True needs the package jsonschema: pip install jsonschema"
        ) from error
    schema = json.loads(schema_text)
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise ValueError(f"json_schema: {error.message} (at {error.json_path})") from None
    validator = kind(schema, registry=REGISTRY, format_checker=kind.FORMAT_CHECKER)

    def check(text: str) -> None:
        error = exceptions.best_match(validator.iter_errors(json.loads(text)))
        if error is not None:
            raise ValueError(f"{error.message} (at {error.json_path})")

    return check


ARGUMENTS: dict[str, Callable[[Any], tuple[Constraint, Parser | None]]] = {
    "dtype": dtype_constraint,
    "regex": regex_constraint,
    "json_schema": schema_constraint,
}
"""The arguments of `gen` that constrain it, each with the function that reads its value."""


# --- choices -------------------------------------------------------------------------------------


def choices_of(choices: Choices | None) -> tuple[tuple[str, ...], Parser | None]:
    """The texts to choose from and, for an Enum, the reader that makes a text a member.

    The texts of an Enum are its values, which must be strings.
    """
    if isinstance(choices, type) and issubclass(choices, Enum):
        texts: tuple[object, ...] = tuple(member.value for member in choices)
        reader: Parser | None = choices
    elif isinstance(choices, str | type) or not choices:
        raise ValueError("select needs a non-empty list of choices")
    else:
        texts, reader = tuple(choices), None
    strings = tuple(text for text in texts if isinstance(text, str) and text)
    if not strings or len(strings) < len(texts):
        raise ValueError("every choice of a select must be a non-empty string")
    for text in strings:
        check_unicode(text)
    return strings, reader
