"""`anyOf` and `oneOf`: their branches, and whether no value is valid against two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import NothingValidError
from sgl_vllm.fsm.schema.conjunctions import Conjunctions
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, TYPES, Branch, Schema, branches_of
from sgl_vllm.fsm.schema.values import identity, is_a, listed_values
from sgl_vllm.fsm.schema.workspace import Workspace

_MAX_DISJOINT_DEPTH = 8


class Alternatives:
    """The branches of `anyOf` and `oneOf`.

    Args:
        complement: a schema of the values that are invalid against one.
    """

    def __init__(
        self,
        conjunctions: Conjunctions,
        workspace: Workspace,
        complement: Callable[[Schema], Schema],
    ) -> None:
        self._conjunctions = conjunctions
        self._workspace = workspace
        self._complement = complement

    def of(self, schema: dict[str, Any]) -> list[Schema] | None:
        """Schemas that together have the values of `schema`; None if it has no branches.

        Args:
            schema: has neither references nor `allOf`.

        Raises NothingValidError: no branch can be valid.
        """
        if "anyOf" in schema:
            siblings = _constraints(schema, "anyOf")
            found = [self._both(siblings, branch) for branch in schema["anyOf"]]
        elif "oneOf" in schema:
            siblings = _constraints(schema, "oneOf")
            found = self._exclusive(branches_of(schema["oneOf"]), siblings)
        else:
            return None
        possible: list[Schema] = [branch for branch in found if branch is not False]
        if not possible:
            raise NothingValidError("no branch can be valid")
        return possible

    def _exclusive(self, branches: Sequence[Branch], siblings: dict[str, Any]) -> list[Schema]:
        """Each branch, less the values that are also valid against another."""
        beside = [self._both(siblings, branch.whole) for branch in branches]
        overlaps: list[set[int]] = [set() for _ in branches]
        for i, a in enumerate(beside):
            for j, b in enumerate(beside[:i]):
                if not self._are_disjoint(a, b, 0):
                    overlaps[i].add(j)
                    overlaps[j].add(i)
        found = []
        for branch, others in zip(beside, overlaps, strict=True):
            for j in sorted(others):
                branch = self._both(branch, self._complement(branches[j].own))
            found.append(branch)
        return found

    def _both(self, a: Schema, b: Schema) -> Schema:
        return self._workspace.keep(self._conjunctions.both(a, b))

    def _are_disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        self._workspace.spend(1)
        if depth > _MAX_DISJOINT_DEPTH:
            return False
        a, b = self._conjunctions.followed(a), self._conjunctions.followed(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        self._workspace.check(a)
        self._workspace.check(b)
        values_a, values_b = listed_values(a), listed_values(b)
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


def _constraints(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """What `schema` says beside a keyword."""
    return {k: v for k, v in schema.items() if k in CONSTRAINTS and k != keyword}


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether only members of `properties` are allowed."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The types of a schema's values, integers as numbers; None if it does not say."""
    values = listed_values(schema)
    if values is not None:
        names = [name for name in TYPES if name != "integer"]
        return {name for v in values for name in names if is_a(v, name)}
    types = schema.get("type")
    if types is None:
        return None
    found = {types} if isinstance(types, str) else set(types)
    return (found - {"integer"}) | ({"number"} if "integer" in found else set())
