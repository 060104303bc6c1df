"""`anyOf` and `oneOf`: their branches, and whether no value is valid against two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.conjunctions import Conjunctions
from sgl_vllm.fsm.schema.keywords import TYPES, Schema
from sgl_vllm.fsm.schema.values import identity, is_a
from sgl_vllm.fsm.schema.workspace import Workspace

_MAX_DISJOINT_DEPTH = 8


class Alternatives:
    """The branches of `anyOf` and `oneOf`."""

    def __init__(self, conjunctions: Conjunctions, workspace: Workspace) -> None:
        self._conjunctions = conjunctions
        self._workspace = workspace

    def branches(self, branches: Sequence[Schema], siblings: dict[str, Any]) -> list[Schema]:
        """The branches that can be valid, each together with the keywords beside `anyOf`."""
        both = self._conjunctions.both
        resolved = (
            [self._workspace.keep(both(siblings, b)) for b in branches] if siblings else branches
        )
        possible: list[Schema] = [b for b in resolved if b is not False]
        if not possible:
            raise UnsupportedSchemaError("no branch can be valid")
        return possible

    def check_exclusive(self, branches: Sequence[Schema]) -> None:
        """Refuse branches of `oneOf` unless a value is certainly valid against one at most."""
        for i, a in enumerate(branches):
            for b in branches[i + 1 :]:
                if not self._are_disjoint(a, b, 0):
                    raise UnsupportedSchemaError("branches of oneOf that may both be valid")

    def _are_disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        if depth > _MAX_DISJOINT_DEPTH:
            return False
        a, b = self._conjunctions.followed(a), self._conjunctions.followed(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        self._workspace.check(a)
        self._workspace.check(b)
        values_a, values_b = _listed_values(a), _listed_values(b)
        if values_a is not None and values_b is not None:
            return {*map(identity, values_a)}.isdisjoint(map(identity, values_b))
        types_a, types_b = _types(a), _types(b)
        if types_a is None or types_b is None:
            return False
        common = types_a & types_b
        if not common:
            return True
        return common == {"object"} and self._are_disjoint_objects(a, b, depth)

    def _are_disjoint_objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Whether a required property differs, or one side requires what the other forbids."""
        properties_a, properties_b = a.get("properties", {}), b.get("properties", {})
        required_a, required_b = set(a.get("required", ())), set(b.get("required", ()))
        for name in required_a & required_b:
            if (
                name in properties_a
                and name in properties_b
                and self._are_disjoint(properties_a[name], properties_b[name], depth + 1)
            ):
                return True
        return (_is_closed(b) and bool(required_a - properties_b.keys())) or (
            _is_closed(a) and bool(required_b - properties_a.keys())
        )


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _listed_values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The types of a schema's values, integers as numbers; None if it does not say."""
    values = _listed_values(schema)
    if values is not None:
        names = [name for name in TYPES if name != "integer"]
        return {name for v in values for name in names if is_a(v, name)}
    types = schema.get("type")
    if types is None:
        return None
    found = {types} if isinstance(types, str) else set(types)
    return (found - {"integer"}) | ({"number"} if "integer" in found else set())
