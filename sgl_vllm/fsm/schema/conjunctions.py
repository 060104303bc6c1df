"""One schema for what is valid against two: `allOf`, and keywords beside `$ref` and `anyOf`.

Owns the merge of two schemas: keyword by keyword, but for those whose meaning depends on their
siblings (`siblings.py`). What cannot be said in one schema is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import (
    CONSTRAINTS,
    Branch,
    Contained,
    Schema,
    Several,
    branches_of,
    several,
)
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.siblings import (
    ARRAYS,
    OBJECTS,
    both_items,
    both_members,
    with_plain_bounds,
)
from sgl_vllm.fsm.schema.values import identity
from sgl_vllm.fsm.schema.workspace import MAX_DEPTH, Workspace

_MERGING = 20
"""The work of merging two schemas, in the unit of `MAX_WORK`."""


class Conjunctions:
    """Merges schemas of one compilation. The same pair gives the same result.

    Args:
        expanded: rewrites keywords that are said by others; the same dict for the same dict.
    """

    def __init__(
        self,
        references: References,
        workspace: Workspace,
        expanded: Callable[[dict[str, Any]], Schema],
    ) -> None:
        self._references = references
        self._workspace = workspace
        self._expanded = expanded
        self._merged: dict[tuple[int, int], Schema] = {}
        self._merging: set[int] = set()
        self._known: dict[tuple[int, int], Schema] = {}

    def both(self, a: Schema, b: Schema) -> Schema:
        """A schema of the values that are valid against both `a` and `b`."""
        if a is True or a == {}:
            return b
        if b is True or b == {}:
            return a
        if a is False or b is False:
            return False
        known = self._known.get((id(a), id(b)))
        if known is not None:
            return known
        if id(a) in self._merging or id(b) in self._merging:
            raise UnsupportedSchemaError("conjunctions that contain themselves")
        self._workspace.descend()
        try:
            merged = self._merge(self.followed(a), self.followed(b))
        finally:
            self._workspace.depth -= 1
        if not (isinstance(merged, dict) and id(merged) in self._merging):
            for schema in (a, b, merged):
                self._workspace.keep(schema)
            self._known[id(a), id(b)] = merged
        return merged

    def followed(self, schema: Schema) -> Schema:
        """The schema behind `$ref`, together with the keywords beside it; and without keywords that
        others can say."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return schema
            self._workspace.check(schema)
            rewritten = self.rewritten(schema)
            if rewritten is schema:
                return schema
            schema = self._workspace.keep(rewritten)
        raise UnsupportedSchemaError("references in a circle")

    def rewritten(self, schema: dict[str, Any]) -> Schema:
        """One step of `followed`, of a well-formed schema; `schema` itself where there is none."""
        return self._expanded(schema)

    def _merge(self, a: Schema, b: Schema) -> Schema:
        if a is b:
            return a
        if isinstance(a, bool) or isinstance(b, bool):
            return self.both(a, b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            raise UnsupportedSchemaError("a schema must be an object, true or false")
        known = self._merged.get((id(a), id(b)))
        if known is not None:
            return known
        for one, other in ((a, b), (b, a)):
            comes_first = one is a
            if "allOf" in one:
                return self._with_all_of(one, other, comes_first)
            for name in ("anyOf", "oneOf"):
                if name in one:
                    return self._with_branches(name, one, other, comes_first)
        if "type" in a and "type" in b and not _common_types(a["type"], b["type"]):
            return False
        if "const" in a and "const" in b and identity(a["const"]) != identity(b["const"]):
            return False
        self._workspace.spend(_MERGING)
        merged: dict[str, Any] = {}
        self._workspace.keep(a)
        self._workspace.keep(b)
        self._merged[id(a), id(b)] = merged
        self._merging.add(id(merged))
        self._merge_keywords(with_plain_bounds(a), with_plain_bounds(b), merged)
        self._merging.remove(id(merged))
        return merged

    def _merge_keywords(self, a: dict[str, Any], b: dict[str, Any], merged: dict[str, Any]) -> None:
        """Add to `merged` what `a` and `b` say, which have neither references nor branches."""
        done: set[str] = set()
        for group, both_of_group in ((ARRAYS, both_items), (OBJECTS, both_members)):
            if a.keys() & group and b.keys() & group:
                merged |= both_of_group(a, b, self._both_kept)
                done |= group
        for name in (*a, *(n for n in b if n not in a)):
            if name not in CONSTRAINTS or name in done:
                continue
            if name not in a or name not in b:
                merged[name] = a.get(name, b.get(name))
            elif name in _LISTED:
                merged[name] = _listed(name, several(a, name), several(b, name))
            elif identity(a[name]) == identity(b[name]):
                merged[name] = a[name]
            elif name == "propertyNames":
                merged[name] = self._both_kept(a[name], b[name])
            else:
                merged[name] = _merged_keyword(name, a[name], b[name])

    def _both_kept(self, a: Schema, b: Schema) -> Schema:
        """As `both`, kept alive; of two equal schemas, one."""
        if a == b and not self._references.has_resources and identity(a) == identity(b):
            return a
        return self._workspace.keep(self.both(a, b))

    def _with_all_of(self, one: dict[str, Any], other: dict[str, Any], comes_first: bool) -> Schema:
        """Members are written in the order in which schemas are merged: those of `one` before or
        after those of `other`."""
        whole: Schema = {k: v for k, v in one.items() if k != "allOf"}
        if not comes_first:
            whole = self.both(other, whole)
        for branch in one["allOf"]:
            whole = self.both(whole, branch)
        return self.both(whole, other) if comes_first else whole

    def _with_branches(
        self, name: str, one: dict[str, Any], other: dict[str, Any], comes_first: bool
    ) -> Schema:
        rest = {k: v for k, v in one.items() if k != name}
        whole: Schema = other
        if not CONSTRAINTS.isdisjoint(rest):
            whole = self.both(rest, other) if comes_first else self.both(other, rest)
        if name == "oneOf":
            return self._with_exclusive(whole, branches_of(one[name]))
        branches = [self._workspace.keep(self.both(whole, branch)) for branch in one[name]]
        possible = [branch for branch in branches if branch is not False]
        if len(possible) == 1:
            return possible[0]
        return {name: possible} if possible else False

    def _with_exclusive(self, whole: Schema, branches: tuple[Branch, ...]) -> Schema:
        """A branch that is not possible beside `whole` excludes nothing either."""
        possible = [
            replace(branch, whole=both)
            for branch in branches
            if (both := self._workspace.keep(self.both(whole, branch.whole))) is not False
        ]
        if len(possible) == 1:
            return possible[0].whole
        return {"oneOf": Several(tuple(possible))} if possible else False


def _merged_keyword(name: str, a: Any, b: Any) -> Any:
    if name == "required":
        return [*a, *(x for x in b if x not in a)]
    if name == "type":
        return _common_types(a, b)
    if name == "uniqueItems":
        return True  # one of them says so
    if name == "enum":
        others = {*map(identity, b)}
        return [x for x in a if identity(x) in others]
    if name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        return max(a, b)
    if name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        return min(a, b)
    raise UnsupportedSchemaError(f"two different {name}")


_LISTED = frozenset({"pattern", "format", "multipleOf", "not", "contains"})
"""Keywords of which a merged schema holds several values."""


def _listed(name: str, a: tuple[Any, ...], b: tuple[Any, ...]) -> Any:
    known = {*map(_key, a)}
    values = (*a, *(value for value in b if _key(value) not in known))
    return values[0] if len(values) == 1 and name not in ("not", "contains") else Several(values)


def _key(value: Any) -> Hashable:
    """As `identity`, also for values that only merged schemas have."""
    if isinstance(value, Contained):
        return id(value.schema), value.low, value.high, value.start
    return identity(value)


def _common_types(a: str | list[str], b: str | list[str]) -> list[str]:
    list_a = [a] if isinstance(a, str) else a
    list_b = [b] if isinstance(b, str) else b
    both = [t for t in list_a if t in list_b]
    if "integer" in (*list_a, *list_b) and "number" in (*list_a, *list_b):
        both.append("integer")
    return both
