"""`unevaluatedProperties` and `unevaluatedItems`, said by other keywords.

Which members and items are evaluated depends on which subschemas a value is valid against, so a
schema is split into cases, each of which evaluates the same ones in every value:

    {"properties": {"a": A}, "anyOf": [{"properties": {"b": B}}, C], "unevaluatedProperties": U}

    anyOf   "b" is valid against B, and all members but "a" and "b" against U
            valid against C, and all members but "a" against U
            both

Owns the cases. Merges nothing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.complements import Complements
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Schema
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.siblings import dependencies_of, items_of
from sgl_vllm.fsm.schema.workspace import Workspace

UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
_APPLICATORS = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf"),
        *("if", "then", "else", "dependentSchemas"),
    }
)
_OWN = CONSTRAINTS - UNEVALUATED - _APPLICATORS
"""Keywords that evaluate the same in every value."""

_MAX_CASES = 256


@dataclass(frozen=True)
class _Evaluated:
    """The members and items that a schema evaluates: those with these names, or whose names match
    these patterns; the first items, and those that are valid against `contained`."""

    all_members: bool = False
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_items: bool = False
    num_items: int = 0
    contained: tuple[Schema, ...] = ()

    def __or__(self, other: _Evaluated) -> _Evaluated:
        return _Evaluated(
            self.all_members or other.all_members,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_items or other.all_items,
            max(self.num_items, other.num_items),
            (*self.contained, *(c for c in other.contained if c not in self.contained)),
        )


@dataclass(frozen=True)
class _Case:
    """The values that are valid against all of `parts`, and what is evaluated in each of them."""

    parts: tuple[Schema, ...] = ()
    evaluated: _Evaluated = _Evaluated()

    def __and__(self, other: _Case) -> _Case:
        return _Case((*self.parts, *other.parts), self.evaluated | other.evaluated)


class Unevaluated:
    """Rewrites the schemas of one compilation. The same schema gives the same result."""

    def __init__(
        self, references: References, complements: Complements, workspace: Workspace
    ) -> None:
        self._references = references
        self._not = complements.of
        self._workspace = workspace
        self._made: dict[int, Schema] = {}

    def without(self, schema: dict[str, Any]) -> Schema:
        """The same values as `schema`, without its own keywords of `UNEVALUATED`."""
        known = self._made.get(id(schema))
        if known is None:
            self._workspace.keep(schema)
            ways: list[Schema] = [{"allOf": [*case.parts]} for case in self._of(schema)]
            known = self._made[id(schema)] = {"anyOf": ways} if ways else False
        return known

    def _of(self, schema: Schema) -> list[_Case]:
        """The cases of a subschema, which together are all its values."""
        if isinstance(schema, bool):
            return [_Case()] if schema else []
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError("a schema must be an object, true or false")
        self._workspace.check(schema)
        self._workspace.descend()
        cases = self._cases(schema)
        self._workspace.depth -= 1
        if not schema.keys() & UNEVALUATED:
            return cases
        everything = _Evaluated(
            all_members="unevaluatedProperties" in schema, all_items="unevaluatedItems" in schema
        )
        return [
            _Case((*case.parts, *_rest(schema, case.evaluated)), case.evaluated | everything)
            for case in cases
        ]

    def _cases(self, schema: dict[str, Any]) -> list[_Case]:
        """The cases of all keywords of `schema` but those of `UNEVALUATED`."""
        own = {k: v for k, v in schema.items() if k in _OWN}
        cases = [_Case((own,) if own else (), self._evaluated_by(own))]
        for target in self._references.targets(schema):
            cases = self._product(cases, self._of(target))
        for branch in schema.get("allOf", ()):
            cases = self._product(cases, self._of(branch))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                cases = self._product(cases, self._branches(name, schema[name]))
        if "if" in schema:
            cases = self._product(cases, self._conditional(schema))
        for name, needed in dependencies_of(schema.get("dependentSchemas", {})).items():
            present = _Case(({"type": "object", "required": [name]},))
            absent = _Case(({"properties": {name: False}},))
            cases = self._product(cases, [absent, *self._product([present], self._of(needed))])
        return cases

    def _branches(self, name: str, branches: list[Schema]) -> list[_Case]:
        """The cases of `anyOf`: some of its branches are valid; of `oneOf`: one is."""
        by_branch = [self._of(branch) for branch in branches]
        evaluated = [case.evaluated for cases in by_branch for case in cases]
        if evaluated and evaluated.count(evaluated[0]) == len(evaluated):
            return [_Case(({name: branches},), evaluated[0])]
        found: list[_Case] = []
        if name == "oneOf":
            for i, cases in enumerate(by_branch):
                others = [self._not(b) for j, b in enumerate(branches) if j != i]
                found += [replace(case, parts=(*case.parts, *others)) for case in cases]
            return found
        # Whether the other branches are valid, too, makes no difference: what they evaluate has
        # cases of its own.
        for size in range(1, len(branches) + 1):
            for chosen in combinations(by_branch, size):
                cases = [_Case()]
                for one in chosen:
                    cases = self._product(cases, one)
                found += cases
                self._check_number(len(found))
        return found

    def _conditional(self, schema: dict[str, Any]) -> list[_Case]:
        met = self._product(self._of(schema["if"]), self._of(schema.get("then", True)))
        unmet = self._product(
            [_Case((self._not(schema["if"]),))], self._of(schema.get("else", True))
        )
        return [*met, *unmet]

    def _product(self, cases: list[_Case], others: list[_Case]) -> list[_Case]:
        self._check_number(len(cases) * len(others))
        return [one & other for one in cases for other in others]

    def _check_number(self, count: int) -> None:
        self._workspace.spend(count)
        if count > _MAX_CASES:
            raise UnsupportedSchemaError("unevaluated members or items in too many cases")

    def _evaluated_by(self, own: dict[str, Any]) -> _Evaluated:
        first, _ = items_of(own)
        evaluates_contained = "contains" in own and self._references.contains_evaluates
        return _Evaluated(
            all_members="additionalProperties" in own,
            names=frozenset(own.get("properties", ())),
            patterns=frozenset(own.get("patternProperties", ())),
            all_items=("items" in own and not isinstance(own["items"], list))
            or ("additionalItems" in own and isinstance(own.get("items"), list)),
            num_items=len(first),
            contained=(own["contains"],) if evaluates_contained else (),
        )


def _rest(schema: dict[str, Any], evaluated: _Evaluated) -> list[Schema]:
    """What the keywords of `UNEVALUATED` ask of members and items that are not evaluated."""
    rest: list[Schema] = []
    if "unevaluatedProperties" in schema and not evaluated.all_members:
        rest.append(
            {
                "properties": dict.fromkeys(sorted(evaluated.names), True),
                "patternProperties": dict.fromkeys(sorted(evaluated.patterns), True),
                "additionalProperties": schema["unevaluatedProperties"],
            }
        )
    if "unevaluatedItems" in schema and not evaluated.all_items:
        item = schema["unevaluatedItems"]
        if evaluated.contained:
            item = {"anyOf": [item, *evaluated.contained]}
        rest.append({"prefixItems": [True] * evaluated.num_items, "items": item})
    return rest
