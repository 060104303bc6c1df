"""The complement of a schema: what is valid against `not`.

    not {"type": "string", "minLength": 2}        any other type, or a string of at most 1 character
    not {"properties": {"a": A}}                  an object whose "a" is invalid against A
    not {"anyOf": [A, B]}                         neither A nor B

A value is invalid if it breaks one keyword, so a complement is `anyOf` with a branch for each.
Most broken keywords can be said by others: `minimum` by `exclusiveMaximum`. The rest stay below
`not`, as `Several` schemas of one type and one keyword (of objects: one rule for members), which
the compilers of that type read.

Owns this table. Merges nothing, so that a schema may contain its own complement. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.formats import EXACT_FORMATS, FORMATS
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Contained, Schema, Several, several
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.siblings import (
    ARRAYS,
    DEPENDENCIES,
    OBJECTS,
    contained_in,
    dependencies_of,
    items_of,
    with_plain_bounds,
)
from sgl_vllm.fsm.schema.values import identity, is_a
from sgl_vllm.fsm.schema.workspace import Workspace

_JSON_TYPES = ("object", "array", "string", "number", "boolean", "null")


class Complements:
    """Complements of the schemas of one compilation. The same schema gives the same complement."""

    def __init__(self, references: References, workspace: Workspace) -> None:
        self._references = references
        self._workspace = workspace
        self._made: dict[int, dict[str, Any]] = {}

    @property
    def are_used(self) -> bool:
        """Whether there is a complement yet."""
        return bool(self._made)

    def of(self, schema: Schema) -> Schema:
        """A schema of the values that are invalid against `schema`.

        Raises UnsupportedSchemaError: no schema says so.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError("a schema must be an object, true or false")
        known = self._made.get(id(schema))
        if known is None:
            self._workspace.keep(schema)
            self._workspace.check(schema)
            known = self._made[id(schema)] = {}
            self._workspace.descend()
            known["anyOf"] = [way for way in self._ways(schema) if way is not False]
            self._workspace.depth -= 1
        return known if known.get("anyOf", True) else False

    def _ways(self, schema: dict[str, Any]) -> list[Schema]:
        """The ways to be invalid against `schema`, one or more for each keyword."""
        if "$ref" in schema and not self._references.siblings_count:
            return [self.of(self._references.resolve(schema))]
        ways: list[Schema] = [self.of(target) for target in self._references.targets(schema)]
        for name in self._references.unknown.intersection(schema):
            raise UnsupportedSchemaError(f"{name} below not, which this draft does not know")
        plain = with_plain_bounds(schema)
        for name in sorted(CONSTRAINTS.intersection(plain)):
            if name in _WAYS:
                ways.extend(_WAYS[name](plain[name]))
            elif name not in _TOGETHER:
                ways.extend(self._composed(name, plain))
        if plain.keys() & OBJECTS:
            ways.extend(self._members(plain))
        if plain.keys() & ARRAYS:
            ways.extend(self._items(plain))
        return ways

    def _composed(self, name: str, schema: dict[str, Any]) -> list[Schema]:
        """The ways to break a keyword that contains schemas."""
        value = schema[name]
        if name == "not":
            return [value] if not isinstance(value, Several) else list(value.values)
        if name == "allOf":
            return [self.of(branch) for branch in value]
        if name == "anyOf":
            return [{"allOf": [self.of(branch) for branch in value]}]
        if name == "oneOf":
            none: Schema = {"allOf": [self.of(branch) for branch in value]}
            pairs = [{"allOf": [a, b]} for i, a in enumerate(value) for b in value[i + 1 :]]
            self._workspace.spend(len(pairs))
            return [none, *pairs]
        if name == "if":
            broken = {k: self.of(schema.get(k, True)) for k in ("then", "else")}
            return [{"if": value, **broken}]
        if name in DEPENDENCIES:
            return [
                _object(required=[one], allOf=[self.of(needed)])
                for one, needed in dependencies_of(value).items()
            ]
        if name == "propertyNames":
            return (
                [] if value is True else [_object(**{"not": Several((_object(**{name: value}),))})]
            )
        if name == "contains":
            return [way for one in contained_in(schema) for way in _outside(one)]
        if name == "uniqueItems" and value is False:
            return []
        if name in ("const", "enum"):
            return self._unlisted([value] if name == "const" else value)
        raise UnsupportedSchemaError(f"{name} below not")

    def of_listed(self, schema: dict[str, Any]) -> Schema:
        """`schema`, of objects or arrays, with what its `not` lists said by other keywords."""
        rules = several(schema, "not")
        others = tuple(rule for rule in rules if "enum" not in rule)
        listed = [value for rule in rules for value in rule.get("enum", ())]
        rest = {k: v for k, v in schema.items() if k != "not"}
        if others:
            rest["not"] = Several(others)
        return {"allOf": [rest, *[self.of(_exactly(value)) for value in listed]]}

    def _members(self, schema: dict[str, Any]) -> list[Schema]:
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        ways: list[Schema] = [
            _object(required=[name], properties={name: self.of(inner)})
            for name, inner in properties.items()
            if inner is not True
        ]
        valid = [_object(patternProperties={p: s}) for p, s in patterns.items() if s is not True]
        rest = schema.get("additionalProperties", True)
        if rest is not True:
            named: dict[str, Any] = {"properties": dict.fromkeys(properties, True)}
            named["patternProperties"] = dict.fromkeys(patterns, True)
            valid.append(_object(**named, additionalProperties=rest))
        return [*ways, *[_object(**{"not": Several((one,))}) for one in valid]]

    def _items(self, schema: dict[str, Any]) -> list[Schema]:
        first, rest = items_of(schema)
        ways: list[Schema] = [
            _array(minItems=i + 1, prefixItems=[*[True] * i, self.of(inner)])
            for i, inner in enumerate(first)
            if inner is not True
        ]
        if rest is not True:
            ways.append(_contains(Contained(self.of(rest), 1, None, start=len(first))))
        return ways

    def _unlisted(self, values: list[Any]) -> list[Schema]:
        """All values but the listed ones."""
        self._workspace.spend(len(values))
        listed = {name: [v for v in values if is_a(v, name)] for name in _JSON_TYPES}
        ways: list[Schema] = [{"type": [name for name in _JSON_TYPES if not listed[name]]}]
        for name in ("object", "array", "string", "number"):
            if listed[name]:
                ways.extend(_without(name, "enum", listed[name]))
        if len({*map(identity, listed["boolean"])}) == 1:
            ways.append({"const": not listed["boolean"][0]})
        return [way for way in ways if way != {"type": []}]


def _object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def _array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


def _contains(contained: Contained) -> Schema:
    return _array(contains=Several((contained,)))


def _without(type_name: str, keyword: str, value: Any) -> list[Schema]:
    """Values of a type, but for those that are valid against one keyword."""
    return [{"type": type_name, "not": Several(({"type": type_name, keyword: value},))}]


def _exactly(value: Any) -> dict[str, Any]:
    """A schema of one array or object."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return _array(prefixItems=items, minItems=len(items), maxItems=len(items))
    members = {name: {"const": member} for name, member in value.items()}
    return _object(properties=members, required=[*members], additionalProperties=False)


def _outside(contained: Contained) -> list[Schema]:
    """Arrays whose count of such items is not within the bounds."""
    low, high = contained.low, contained.high
    ways = [_contains(replace(contained, low=0, high=low - 1))] if low else []
    return ways if high is None else [*ways, _contains(replace(contained, low=high + 1, high=None))]


def _other_types(types: str | list[str]) -> list[Schema]:
    listed = {types} if isinstance(types, str) else {*types}
    others = [name for name in _JSON_TYPES if name not in listed]
    if "integer" not in listed or "number" in listed:
        return [{"type": others}] if others else []
    fractions = _without("number", "type", "integer")
    others.remove("number")
    return [{"type": others}, *fractions] if others else fractions


def _number(keyword: str) -> Callable[[Any], list[Schema]]:
    return lambda value: [{"type": "number", keyword: value}]


def _fewer(type_name: str, keyword: str) -> Callable[[Any], list[Schema]]:
    return lambda value: [{"type": type_name, keyword: value - 1}] if value > 0 else []


def _more(type_name: str, keyword: str) -> Callable[[Any], list[Schema]]:
    return lambda value: [{"type": type_name, keyword: value + 1}]


def _other_format(form: str) -> list[Schema]:
    if form in EXACT_FORMATS:
        return _without("string", "format", form)
    raise UnsupportedSchemaError(f"format {form!r} below not")


_WAYS: dict[str, Callable[[Any], list[Schema]]] = {
    "type": _other_types,
    "required": lambda names: [_object(properties={name: False}) for name in names],
    "minProperties": _fewer("object", "maxProperties"),
    "maxProperties": _more("object", "minProperties"),
    "minItems": _fewer("array", "maxItems"),
    "maxItems": _more("array", "minItems"),
    "minLength": _fewer("string", "maxLength"),
    "maxLength": _more("string", "minLength"),
    "minimum": _number("exclusiveMaximum"),
    "maximum": _number("exclusiveMinimum"),
    "exclusiveMinimum": _number("maximum"),
    "exclusiveMaximum": _number("minimum"),
    "multipleOf": lambda value: _without("number", "multipleOf", value),
    "pattern": lambda value: _without("string", "pattern", value),
    "format": lambda value: _other_format(value) if value in FORMATS else [],
}
"""Keywords that are broken by what one other keyword allows."""

_TOGETHER = OBJECTS.union(
    *(ARRAYS, ("then", "else", "minContains", "maxContains")),
    ("$ref", "$dynamicRef", "$anchor", "$dynamicAnchor"),
)
"""Keywords that are read elsewhere, or with others."""
