"""JSON checked against its schema in the client: `gen(json_schema=..., validate=True)`.

Owns the check itself, and the looser schema for a server that refuses the whole one. Generating
again is in `generation.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.lang.constraints import JSON_SCHEMA, Constraint, Parser

_KEPT = ("$defs", "$id", "$anchor", "$ref", "const", "definitions", "enum", "required", "type")
_SCHEMA = ("additionalProperties", "items")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS_BY_NAME = ("$defs", "definitions", "properties")


def checked(constraint: Constraint, parse: Parser | None) -> tuple[Constraint, Parser]:
    """A schema's constraint with a looser one beside it, and a reader that validates first.

    The reader raises ValueError for what is invalid, and otherwise returns what `parse` makes of
    the text, or the text. As far as the `jsonschema` package knows them, formats are checked;
    patterns are Python's; references to other documents are errors.

    Cost: making the validator, a millisecond or so, once per schema.

    Raises:
        ValueError: the schema is not valid itself.
        ImportError: `jsonschema` is not installed.
    """
    check, looser = _checker(constraint.text)

    def read(text: str) -> object:
        check(text)
        return text if parse is None else parse(text)

    return replace(constraint, looser=looser), read


@lru_cache(maxsize=256)
def _checker(text: str) -> tuple[Callable[[str], None], Constraint | None]:
    """What raises ValueError for text that is not valid against the schema `text`, and the schema's
    looser form, if that differs."""
    try:
        from jsonschema import exceptions, validators
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise ImportError(
            "validate=True needs the package jsonschema: pip install 'sgl-vllm[validate]'"
        ) from error
    schema = json.loads(text)
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

    structure = _structure(schema)
    looser = Constraint(JSON_SCHEMA, json.dumps(structure)) if structure != schema else None
    return check, looser


def _structure(schema: Any) -> Any:
    """What all backends support of a schema: types, members, items, listed values, alternatives.

    What is valid against the schema is valid against this, as JSON Schema defines it.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {name: schema[name] for name in _KEPT if name in schema}
    for name in _SCHEMA:
        if name in schema:
            kept[name] = _structure(schema[name])
    for name in _SCHEMAS:
        if name in schema:
            kept[name] = [_structure(branch) for branch in schema[name]]
    for name in _SCHEMAS_BY_NAME:
        if name in schema:
            kept[name] = {key: _structure(value) for key, value in schema[name].items()}
    if "patternProperties" in schema:
        kept.pop("additionalProperties", None)  # they are not additional
    if "oneOf" in kept:  # branches that exclude each other may no longer do so
        branches = kept.pop("oneOf")
        kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": branches}]
    return kept
