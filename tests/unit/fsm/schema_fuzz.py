"""Random conjunctions of JSON schemas, compared with the `jsonschema` package.

A schema is made of fragments that constrain the same values in different places: `allOf`, keywords
beside `$ref` and `anyOf`, `not`, `if`, `contains`, `$ref` into a subschema with its own `$id`. Each
schema that compiles is tried with instances that its own names and values suggest, and with random
texts of its automaton.
A text that the automaton accepts and `jsonschema` calls invalid is an error. Valid instances may be
refused: an automaton asks for members of large objects in their order, for example.

The same seed gives the same schemas. Cost: about 15 ms for each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.schema import Schema, UnsupportedSchemaError, compile_schema
from tests.unit.fsm.texts import accepts, random_text

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NAMES = ("a", "b", "ab", "c", "x1")
IN_PYTHON = {
    "^a": "^a",
    "b$": r"b\Z",
    "^[ab]+$": r"^[ab]+\Z",
    "1": "1",
    "^c": "^c",
    "^x.$": "^x[^\n\r\u2028\u2029]\\Z",
}
"""Patterns of ECMA-262, and what Python has to be asked instead: to it, `$` also stands before the
last line end, and `.` is any character but one."""

PATTERNS = tuple(IN_PYTHON)

STRINGS = ("", "a", "b", "ab", "abc", "x1", "ba", "1")
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 1.5, 2.5)
SCALARS = (*STRINGS, *NUMBERS, True, False, None)
NUM_INSTANCES = 12
NUM_WALKS = 4
MAX_TEXT_BYTES = 200


@dataclass
class Outcome:
    """What became of the schemas that were tried.

    Attributes:
        refused: schemas that were not compiled.
        accepted: texts that were accepted.
        wrong: pairs of a schema and an invalid text that was accepted.
    """

    schemas: int = 0
    refused: int = 0
    accepted: int = 0
    wrong: list[tuple[Schema, str]] = field(default_factory=list)


class Generator:
    """Makes schemas and instances from one source of randomness."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_old = rng.random() < 0.2
        self._names = "de" if rng.random() < 0.7 else "der"
        self._definitions = "definitions" if self._is_old else "$defs"

    def schema(self) -> Schema:
        """A schema, with definitions for its references."""
        rng = self._rng
        definitions = {name: self._fragment(1) for name in "de"}
        if "r" in self._names:
            definitions["r"] = self._resource()
        schema = self._conjunction(rng.choice((1, 2)))
        if self._is_old:
            schema["$schema"] = DRAFT_7
        return {**schema, self._definitions: definitions}

    def _resource(self) -> dict[str, Any]:
        """A subschema with its own `$id` and definitions, whose pointers start at itself."""
        names, self._names = self._names, "de"
        inner = {"d": self._fragment(0), "e": self._fragment(0)}
        conjunction = self._conjunction(1)
        self._names = names
        return {"$id": "http://example.com/r", **conjunction, self._definitions: inner}

    def _some(self, **makers: Callable[[], Any]) -> dict[str, Any]:
        """Some of the keywords, at least one."""
        names = [name for name in makers if self._rng.random() < 0.45]
        return {name: makers[name]() for name in names or [self._rng.choice(list(makers))]}

    def _conjunction(self, depth: int) -> dict[str, Any]:
        """Several fragments, most of them for the same type."""
        rng = self._rng
        kind = rng.choice(("object", "object", "array", "array", "number", "string", None))
        parts = [self._fragment(depth, kind) for _ in range(rng.choice((2, 2, 3)))]
        schema = parts.pop()
        way = rng.choice(("allOf", "allOf", "$ref", "anyOf", "oneOf", "nested", "both"))
        if way == "$ref":
            schema["$ref"] = self._reference()
        elif way in ("anyOf", "oneOf"):
            schema[way] = parts
        elif way == "nested":
            schema = {"allOf": [{"allOf": parts}, schema]}
        elif way == "both":
            schema |= {"allOf": parts[:1], "anyOf": [*parts, self._fragment(depth, kind)]}
        else:
            schema["allOf"] = parts
        if rng.random() < 0.1:
            schema["type"] = kind or "object"
        return schema

    def _reference(self) -> str:
        return f"#/{self._definitions}/{self._rng.choice(self._names)}"

    def _fragment(self, depth: int, kind: str | None = None) -> Any:
        rng = self._rng
        draw = rng.random()
        if draw < 0.02:
            return {}
        if depth > 0 and draw < 0.1:
            return {"$ref": self._reference()}
        if depth > 0 and draw < 0.2:
            return self._conjunction(depth - 1)
        if draw < (0.22 if kind else 0.3):
            return self._values()
        kind = kind or rng.choice(("object", "array", "number", "string"))
        fragment = getattr(self, f"_{kind}")(depth - 1)
        if rng.random() < 0.3:
            fragment["type"] = kind
        if rng.random() < 0.15:
            fragment |= self._condition(depth, kind)
        return fragment

    def _condition(self, depth: int, kind: str) -> dict[str, Any]:
        """Keywords that ask whether a value is invalid against a schema."""
        rng = self._rng

        def inner() -> Schema:
            if rng.random() < 0.3:
                return self._values()
            return self._fragment(depth - 1, kind) if depth > 0 else self._leaf()

        if rng.random() < 0.5:
            return {"not": inner()}
        if rng.random() < 0.5:
            return {"oneOf": [inner() for _ in range(rng.choice((2, 2, 3)))]}
        return {"if": inner(), **self._some(**{"then": inner, "else": inner})}

    def _values(self) -> dict[str, Any]:
        rng = self._rng
        some = rng.sample(SCALARS, rng.randint(1, 4))
        type_ = rng.choice(("string", "integer", ["integer", "null"], ["number", "string"]))
        return rng.choice(({"enum": some}, {"const": some[0]}, {"type": type_}))

    def _subschema(self, depth: int) -> Schema:
        rng = self._rng
        draw = rng.random()
        if draw < 0.12:
            return False
        if draw < 0.2:
            return True
        return self._fragment(max(depth, 0)) if depth >= 0 else self._leaf()

    def _leaf(self) -> dict[str, Any]:
        return self._rng.choice((self._number, self._string, lambda _: self._values()))(0)

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        numbers = [lambda: rng.choice(NUMBERS)] * 4
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        found = self._some(**dict(zip(names, numbers, strict=True)))
        if rng.random() < 0.2:
            found["multipleOf"] = rng.choice((1, 2, 3, 0.5, 1.5))
        return found

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return self._some(
            minLength=lambda: rng.randint(0, 2),
            maxLength=lambda: rng.randint(0, 3),
            pattern=lambda: rng.choice(PATTERNS),
        )

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def named(names: tuple[str, ...]) -> Callable[[], dict[str, Schema]]:
            return lambda: {
                name: self._subschema(depth) for name in rng.sample(names, rng.randint(1, 3))
            }

        fragment = self._some(
            properties=named(NAMES),
            patternProperties=named(PATTERNS[:4]),
            additionalProperties=lambda: self._subschema(depth),
            required=lambda: rng.sample(NAMES, rng.randint(1, 2)),
        )
        if rng.random() < 0.2:
            fragment |= self._some(
                minProperties=lambda: rng.randint(0, 3), maxProperties=lambda: rng.randint(0, 3)
            )
        if rng.random() < 0.2:
            fragment |= self._dependency(depth)
        if rng.random() < 0.1:
            fragment["propertyNames"] = self._string(0)
        if rng.random() < 0.1 and not self._is_old:
            fragment["unevaluatedProperties"] = self._subschema(depth)
        return fragment

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        fragment = self._some(
            prefixItems=lambda: [self._subschema(depth) for _ in range(rng.randint(1, 3))],
            items=lambda: self._subschema(depth),
        )
        if self._is_old and "prefixItems" in fragment:
            rest = {"additionalItems": fragment["items"]} if "items" in fragment else {}
            fragment = {"items": fragment["prefixItems"], **rest}
        if rng.random() < 0.3:
            fragment |= self._some(
                minItems=lambda: rng.randint(0, 3), maxItems=lambda: rng.randint(0, 3)
            )
        if rng.random() < 0.2:
            fragment["contains"] = self._subschema(depth)
            if not self._is_old and rng.random() < 0.5:
                fragment |= self._some(
                    minContains=lambda: rng.randint(0, 2), maxContains=lambda: rng.randint(0, 2)
                )
        if rng.random() < 0.1:
            fragment["uniqueItems"] = True
        if rng.random() < 0.1 and not self._is_old:
            fragment["unevaluatedItems"] = self._subschema(depth)
        return fragment

    def _dependency(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        name, other = rng.sample(NAMES, 2)
        if rng.random() < 0.5:
            return {"dependencies" if self._is_old else "dependentRequired": {name: [other]}}
        keyword = "dependencies" if self._is_old else "dependentSchemas"
        return {keyword: {name: self._subschema(depth)}}

    def text(self, depth: int = 2) -> str:
        """An instance as JSON. An object may hold a name twice."""
        rng = self._rng
        draw = rng.random()
        if depth == 0 or draw < 0.3:
            return json.dumps(rng.choice(SCALARS))
        inner = [self.text(depth - 1) for _ in range(rng.randint(0, 4))]
        if draw < 0.65:
            return f"[{', '.join(inner)}]"
        names = rng.choices((*NAMES, "z"), k=len(inner))
        return "{" + ", ".join(f'"{n}": {v}' for n, v in zip(names, inner, strict=True)) + "}"


def for_python(schema: Any) -> Any:
    """The schema as `jsonschema` has to be given it, which takes patterns for Python's."""
    if isinstance(schema, list):
        return [for_python(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        IN_PYTHON.get(name, name): IN_PYTHON[value] if name == "pattern" else for_python(value)
        for name, value in schema.items()
    }


def value_of(text: str) -> Any:
    """The value of a JSON text, or `ValueError` where a float cannot hold it exactly."""

    def exact(digits: str) -> float:
        value = float(digits)
        if Decimal(digits) != Decimal(repr(value)):
            raise ValueError("a number that a float rounds")
        return value

    return json.loads(text, parse_float=exact)


def examine(schema: Schema, rng: random.Random, outcome: Outcome) -> None:
    """Compile one schema, and compare it with `jsonschema`."""
    outcome.schemas += 1
    try:
        grammar = Automaton(compile_schema(json.loads(json.dumps(schema))))
        texts = [random_text(grammar.start, rng, MAX_TEXT_BYTES) for _ in range(NUM_WALKS)]
    except (UnsupportedSchemaError, TooComplexError):
        outcome.refused += 1
        return
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(for_python(schema))
    instances = [Generator(rng).text() for _ in range(NUM_INSTANCES)]
    for text in (*instances, *[t.decode() for t in texts if t is not None]):
        try:
            value = value_of(text)
        except ValueError:
            continue
        is_accepted = accepts(grammar, text)
        try:
            is_valid = validator.is_valid(value)
        except RecursionError:  # a reference to itself, which means nothing
            return
        outcome.accepted += is_accepted
        if is_accepted and not is_valid:
            outcome.wrong.append((schema, text))
            return


def fuzz(count: int, seed: int) -> Outcome:
    outcome = Outcome()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        examine(Generator(rng).schema(), rng, outcome)
    return outcome
