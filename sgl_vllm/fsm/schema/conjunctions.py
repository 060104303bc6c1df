"""One schema for what is valid against two: `allOf`, and keywords beside `$ref` and `anyOf`.

Owns the merge of two schemas: keyword by keyword, but for those whose meaning depends on their
siblings (`siblings.py`). What cannot be said in one schema is refused.
"""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Schema
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.siblings import (
    ARRAYS,
    OBJECTS,
    both_items,
    both_members,
    with_plain_bounds,
)
from sgl_vllm.fsm.schema.values import identity, non_empty_list
from sgl_vllm.fsm.schema.workspace import MAX_DEPTH, Workspace


class Conjunctions:
    """Merges schemas of one compilation. The same pair gives the same result.

    Args:
        is_strict: schemas are read as xgrammar does, so an object with `properties` is closed.
    """

    def __init__(self, references: References, workspace: Workspace, is_strict: bool) -> None:
        self._references = references
        self._workspace = workspace
        self._is_strict = is_strict
        self._merged: dict[tuple[int, int], Schema] = {}
        self._merging: set[int] = set()

    def both(self, a: Schema, b: Schema) -> Schema:
        """A schema of the values that are valid against both `a` and `b`."""
        if a is True or a == {}:
            return b
        if b is True or b == {}:
            return a
        if a is False or b is False:
            return False
        if id(a) in self._merging or id(b) in self._merging:
            raise UnsupportedSchemaError("conjunctions that contain themselves")
        self._workspace.descend()
        try:
            return self._merge(self.followed(a), self.followed(b))
        finally:
            self._workspace.depth -= 1

    def followed(self, schema: Schema) -> Schema:
        """The schema behind `$ref`, together with the keywords beside it."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._workspace.keep(self.behind(schema))
        raise UnsupportedSchemaError("references in a circle")

    def behind(self, schema: dict[str, Any]) -> Schema:
        """The schema that the `$ref` of `schema` points to, together with the keywords beside it,
        if these count."""
        target = self._references.resolve(schema)
        if not self._references.siblings_count:
            return target
        others = {k: v for k, v in schema.items() if k in CONSTRAINTS and k != "$ref"}
        return self.both(target, others)

    def _merge(self, a: Schema, b: Schema) -> Schema:
        if isinstance(a, bool) or isinstance(b, bool):
            return self.both(a, b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            raise UnsupportedSchemaError("a schema must be an object, true or false")
        self._workspace.check(a)
        self._workspace.check(b)
        known = self._merged.get((id(a), id(b)))
        if known is not None:
            return known
        for one, other in ((a, b), (b, a)):
            if "allOf" in one:
                return self._with_all_of(one, other)
            for name in ("anyOf", "oneOf"):
                if name in one:
                    return self._with_branches(name, one, other)
        if "type" in a and "type" in b and not _common_types(a["type"], b["type"]):
            return False
        merged: dict[str, Any] = {}
        self._workspace.keep(a)
        self._workspace.keep(b)
        self._merged[id(a), id(b)] = merged
        self._merging.add(id(merged))
        a, b = with_plain_bounds(a), with_plain_bounds(b)
        for group, both_of_group in ((ARRAYS, both_items), (OBJECTS, both_members)):
            if a.keys() & group and b.keys() & group:
                if self._is_strict:
                    _check_closed(a, b)
                merged |= both_of_group(a, b, self._both_kept)
        for name in (*a, *(n for n in b if n not in a)):
            if name not in CONSTRAINTS or name in merged:
                continue
            if name not in a or name not in b:
                merged[name] = a.get(name, b.get(name))
            elif identity(a[name]) == identity(b[name]):
                merged[name] = a[name]
            else:
                merged[name] = _merged_keyword(name, a[name], b[name])
        self._merging.remove(id(merged))
        return merged

    def _both_kept(self, a: Schema, b: Schema) -> Schema:
        """As `both`, kept alive; of two equal schemas, one."""
        if not self._references.has_resources and identity(a) == identity(b):
            return a
        return self._workspace.keep(self.both(a, b))

    def _with_all_of(self, one: dict[str, Any], other: dict[str, Any]) -> Schema:
        whole: Schema = {k: v for k, v in one.items() if k != "allOf"}
        for branch in non_empty_list(one["allOf"], "allOf"):
            whole = self.both(whole, branch)
        return self.both(whole, other)

    def _with_branches(self, name: str, one: dict[str, Any], other: dict[str, Any]) -> Schema:
        rest = {k: v for k, v in one.items() if k != name}
        whole = self.both(rest, other) if rest.keys() & CONSTRAINTS else other
        branches = non_empty_list(one[name], name)
        return {name: [self._workspace.keep(self.both(whole, branch)) for branch in branches]}


def _check_closed(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Refuse a closed object beside properties of its own in another."""
    for one, other in ((a, b), (b, a)):
        extra = other.get("properties", {}).keys() - one.get("properties", {}).keys()
        if extra and one.get("additionalProperties", True) is not True:
            raise UnsupportedSchemaError("additionalProperties across a conjunction")


def _merged_keyword(name: str, a: Any, b: Any) -> Any:
    if name == "required":
        return [*a, *(x for x in b if x not in a)]
    if name == "type":
        return _common_types(a, b)
    if name == "enum":
        others = {*map(identity, b)}
        return [x for x in a if identity(x) in others]
    if name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        return max(a, b)
    if name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        return min(a, b)
    raise UnsupportedSchemaError(f"two different {name}")


def _common_types(a: str | list[str], b: str | list[str]) -> list[str]:
    list_a = [a] if isinstance(a, str) else a
    list_b = [b] if isinstance(b, str) else b
    both = [t for t in list_a if t in list_b]
    if "integer" in (*list_a, *list_b) and "number" in (*list_a, *list_b):
        both.append("integer")
    return both
