"""Which schemas a member of an object must be valid against, by its name.

    {"properties": {"a": A}, "patternProperties": {"^x": B}, "additionalProperties": R}

    "a": A      names that begin with x: B      all others: R

Several such rules may constrain one object, and patterns may overlap. So names are divided into
*regions*, in each of which all members are constrained by the same keywords.

Owns the regions. Does not own the order of members (`members.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.json_string import NAME_STRING, STRING, JsonString
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.schema import strings
from sgl_vllm.fsm.schema.context import Context, string
from sgl_vllm.fsm.schema.keywords import Schema
from sgl_vllm.fsm.schema.values import quoted

_MAX_REGIONS = 64

Rule = dict[str, Any]
"""A schema with any of `OBJECTS` or `propertyNames`; other keywords are not read."""


class Region(NamedTuple):
    """Names that are not listed, and that the same patterns match.

    Attributes:
        key: such a name.
        matched: the automata, by id, that accept these names.
    """

    key: Expression
    matched: frozenset[int]


class Rules:
    """The patterns of several rules, compiled."""

    def __init__(self, context: Context, rules: Sequence[Rule]) -> None:
        self._context = context
        patterns = dict.fromkeys(p for rule in rules for p in rule.get("patternProperties", ()))
        self._patterns = {p: context.workspace.pattern(p) for p in patterns}
        self._names = {
            id(rule): strings.names(context, rule["propertyNames"])
            for rule in rules
            if "propertyNames" in rule
        }

    def of_name(self, rule: Rule, name: str) -> Schema:
        """The schema of a listed member."""
        listed = rule.get("properties", {})
        if not (self._patterns or self._names):
            return listed[name] if name in listed else rule.get("additionalProperties", True)
        text = quoted(name)
        if id(rule) in self._names and not self._names[id(rule)].accepts(text):
            return False
        matching = [s for p, s in _patterns(rule) if self._patterns[p].accepts(text)]
        return self._all([*([listed[name]] if name in listed else []), *matching], rule)

    def of_region(self, rule: Rule, region: Region) -> Schema:
        """The schema of members that are not listed."""
        if id(rule) in self._names and id(self._names[id(rule)]) not in region.matched:
            return False
        matching = [s for p, s in _patterns(rule) if id(self._patterns[p]) in region.matched]
        return self._all(matching, rule)

    def _all(self, schemas: list[Schema], rule: Rule) -> Schema:
        if not schemas:
            return rule.get("additionalProperties", True)
        whole = schemas[0]
        for schema in schemas[1:]:
            whole = self._context.both(whole, schema)
        return whole

    def regions(self, listed: Iterable[str]) -> list[Region]:
        """All names that are not `listed`."""
        names = sorted({quoted(name) for name in listed})
        automata = [*self._patterns.values(), *self._names.values()]
        if not automata:
            # A listed name must not come back in another spelling.
            inner = Names.of(name[1:-1] for name in names)
            key = string(JsonString.of(STRING if inner is None else NAME_STRING, names=inner))
            return [Region(key, frozenset())]
        workspace = self._context.workspace
        regions: list[tuple[ByteDfa, frozenset[int]]] = [(strings.any_text(), frozenset())]
        for dfa in automata:
            split = []
            for names_of_region, matched in regions:
                inside = workspace.common(names_of_region, dfa)
                if inside.is_empty:
                    split.append((names_of_region, matched))
                    continue
                split.append((inside, matched | {id(dfa)}))
                outside = workspace.common(names_of_region, dfa, minus=True)
                if not outside.is_empty:
                    split.append((outside, matched))
            regions = split
            if len(regions) > _MAX_REGIONS:
                raise UnsupportedSchemaError("patternProperties that overlap in too many ways")
        found = []
        for dfa, matched in regions:
            if excluded := [name for name in names if dfa.accepts(name)]:
                dfa = workspace.common(dfa, workspace.texts(excluded), minus=True)
            if not dfa.is_empty:
                found.append(Region(dfa.expression, matched))
        return found


def _patterns(rule: Rule) -> Iterable[tuple[str, Schema]]:
    return rule.get("patternProperties", {}).items()
