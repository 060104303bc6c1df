"""A schema document to nodes.

Owns the check of keywords' values, and the differences between drafts: after this, there are none,
but for what an integer is. Does not own where a reference points to (`references.py`). A part that
only references reach is parsed when the first of them is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema import keywords as kw
from sgl_vllm.fsm.schema.formats import FORMATS, UNSUPPORTED_FORMATS
from sgl_vllm.fsm.schema.nodes import All, AnyOf, If, Node, Not, OneOf, Reference, Unevaluated
from sgl_vllm.fsm.schema.references import References, Subschema, escaped
from sgl_vllm.fsm.schema.value_sets import (
    ANY,
    NEVER,
    Arrays,
    Bound,
    Contained,
    ItemRule,
    MemberRule,
    Numbers,
    Objects,
    Strings,
    Text,
    ValueSet,
    intersection,
    listed,
    union,
)
from sgl_vllm.fsm.schema.workspace import Workspace

_PLAIN = {
    "object": ValueSet(objects=ANY.objects),
    "array": ValueSet(arrays=ANY.arrays),
    "string": ValueSet(strings=ANY.strings),
    "number": ValueSet(numbers=ANY.numbers),
    "integer": ValueSet(numbers=(Numbers(is_integer=True),)),
    "boolean": ValueSet(atoms=frozenset({True, False})),
    "null": ValueSet(atoms=frozenset({None})),
}
"""Schemas of nothing but a type: most subschemas."""

_MEMBERS = frozenset({"properties", "patternProperties", "additionalProperties"})


class Parser:
    """Parses one document. Each of its subschemas becomes one node.

    Attributes:
        draft: as of `References`.
        root: the whole document.
    """

    def __init__(self, root: Any, workspace: Workspace) -> None:
        self._references = References(root)
        self.draft = self._references.draft
        self._known = kw.KNOWN[self.draft]
        self._workspace = workspace
        self._parsed: dict[str, Node] = {}
        self._targets: dict[Reference, Node] = {}
        self.root = self._node(root, "#")

    def target(self, reference: Reference) -> Node:
        """What a reference points to.

        Raises UnsupportedSchemaError: there is no such subschema in this document, or the reference
            is malformed.
        """
        known = self._targets.get(reference)
        if known is None:
            with self._workspace.inside(reference.place):
                at = self._references.resolve(
                    reference.text, reference.place or "#", is_dynamic=reference.is_dynamic
                )
            known = self._parsed.get(at.place) or self._node(at.schema, at.place)
            self._targets[reference] = known
        return known

    def _node(self, schema: Any, place: str) -> Node:
        if isinstance(schema, bool):
            return ANY if schema else NEVER
        names = self._known.intersection(schema) if isinstance(schema, dict) else frozenset()
        if len(names) == 1 and isinstance(name := schema.get("type"), str) and name in _PLAIN:
            return _PLAIN[name]
        with self._workspace.inside(place):
            if not isinstance(schema, dict):
                raise UnsupportedSchemaError(f"a schema cannot be a {type(schema).__name__}")
            node = self._parse(Subschema(schema, place), names)
        self._parsed[place] = node
        return node

    def _parse(self, at: Subschema, names: frozenset[str]) -> Node:
        schema, place = at
        self._workspace.spend(1 + len(schema))
        self._references.check_draft(schema)
        if "prefixItems" in schema and "prefixItems" not in self._known:
            raise UnsupportedSchemaError("prefixItems, which this draft does not know")
        if "$recursiveRef" in names:
            raise UnsupportedSchemaError("$recursiveRef is not supported")
        if names <= kw.LEAVES:
            return self._leaf(at, names) if names else ANY
        targets: list[Node] = []
        if "$ref" in names:
            targets.append(Reference(schema["$ref"], place=place))
            if self.draft <= 7:  # keywords beside it are ignored
                return targets[0]
        if "$dynamicRef" in names:
            targets.append(Reference(schema["$dynamicRef"], is_dynamic=True, place=place))
        leaf: list[Node] = []
        if not names.isdisjoint(kw.LEAVES):
            leaf.append(self._leaf(at, names))
        is_whole = names.isdisjoint(kw.UNEVALUATED)
        parts = [*targets, *leaf] if is_whole else [*leaf, *targets]
        parts += self._applicators(at, names)
        node = parts[0] if len(parts) == 1 else All(tuple(parts), place=place) if parts else ANY
        if is_whole:
            return node
        members = self._inner(at, "unevaluatedProperties")
        return Unevaluated(node, members, self._inner(at, "unevaluatedItems"), place=place)

    # -- subschemas of a keyword

    def _inner(self, at: Subschema, keyword: str) -> Node | None:
        if keyword not in at.schema:
            return None
        schema = kw.value(at.schema, keyword, dict, bool)
        return self._node(schema, f"{at.place}/{keyword}")

    def _given(self, at: Subschema, keyword: str) -> Node:
        return self._inner(at, keyword) or ANY

    def _listed(self, at: Subschema, keyword: str) -> tuple[Node, ...]:
        if keyword not in at.schema:
            return ()
        schemas, place = kw.value(at.schema, keyword, list), f"{at.place}/{keyword}"
        self._workspace.spend(len(schemas))
        return tuple([self._node(one, f"{place}/{i}") for i, one in enumerate(schemas)])

    def _named(self, at: Subschema, keyword: str) -> dict[str, Node]:
        if keyword not in at.schema:
            return {}
        schemas, place = kw.by_name(at.schema, keyword), f"{at.place}/{keyword}"
        self._workspace.spend(len(schemas))
        return {n: self._node(one, f"{place}/{escaped(n)}") for n, one in schemas.items()}

    # -- keywords that combine subschemas

    def _applicators(self, at: Subschema, names: frozenset[str]) -> list[Node]:
        place = at.place
        parts: list[Node] = [*self._listed(at, "allOf")] if "allOf" in names else []
        if "anyOf" in names:
            parts.append(AnyOf(self._listed(at, "anyOf"), place=place))
        if "oneOf" in names:
            parts.append(OneOf(self._listed(at, "oneOf"), place=place))
        if "not" in names:
            parts.append(Not(self._given(at, "not"), place=place))
        if "if" in names:
            then, otherwise = self._given(at, "then"), self._given(at, "else")
            parts.append(If(self._given(at, "if"), then, otherwise, place=place))
        for keyword in sorted(names & kw.DEPENDENCIES):
            for name, needed in kw.by_name(at.schema, keyword).items():
                if isinstance(needed, list):
                    asked: Node = _with_members(kw.names(at.schema[keyword], name))
                else:
                    asked = self._node(needed, f"{place}/{keyword}/{escaped(name)}")
                absent = Objects(rules=(MemberRule({name: NEVER}),))
                without = replace(ANY, objects=(absent,))
                present = All((asked, _with_members((name,))))
                parts.append(AnyOf((without, present), place=place))
        return parts

    # -- keywords of a leaf

    def _leaf(self, at: Subschema, names: frozenset[str]) -> ValueSet:
        schema, whole = at.schema, ANY
        lists = [[schema["const"]]] if "const" in names else []
        lists += [kw.value(schema, "enum", list)] if "enum" in names else []
        self._workspace.spend(sum(map(len, lists)))
        if len(lists) == len(names) == 1:
            return listed(lists[0], place=at.place)
        if "type" in names:
            types = [_PLAIN[name] for name in kw.types(schema)]
            whole = types[0] if len(types) == 1 else union(types)
        if len(names) > len(lists) + ("type" in names):
            whole = self._constrained(at, names, whole)
        for among in lists:
            whole = intersection(whole, listed(among), self._workspace.spend, place=at.place)
        return whole

    def _constrained(self, at: Subschema, names: frozenset[str], whole: ValueSet) -> ValueSet:
        """The values of some types, as the keywords of each type constrain them."""
        objects, arrays = whole.objects, whole.arrays
        strings, numbers = whole.strings, whole.numbers
        if objects and not names.isdisjoint(kw.OF_OBJECTS):
            objects = (self._objects(at, names),)
        if arrays and not names.isdisjoint(kw.OF_ARRAYS):
            arrays = (self._arrays(at, names),)
        if strings and not names.isdisjoint(kw.OF_STRINGS):
            strings = (_strings(at.schema),)
        if numbers and not names.isdisjoint(kw.OF_NUMBERS):
            numbers = (_numbers(at.schema, numbers[0].is_integer),)
        return ValueSet(objects, arrays, strings, numbers, whole.atoms, place=at.place)

    def _objects(self, at: Subschema, names: frozenset[str]) -> Objects:
        rules: list[MemberRule] = []
        if not names.isdisjoint(_MEMBERS):
            named, patterns = self._named(at, "properties"), self._named(at, "patternProperties")
            rules.append(MemberRule(named, patterns, self._inner(at, "additionalProperties")))
        if "propertyNames" in names:
            rules.append(MemberRule(names=self._inner(at, "propertyNames")))
        low, high = kw.limits(at.schema, "minProperties", "maxProperties")
        return Objects(low, high, kw.names(at.schema, "required"), tuple(rules))

    def _arrays(self, at: Subschema, names: frozenset[str]) -> Arrays:
        schema = at.schema
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                raise UnsupportedSchemaError("prefixItems beside a list of items")
            rule = ItemRule(self._listed(at, "items"), self._inner(at, "additionalItems"))
        else:
            rule = ItemRule(self._listed(at, "prefixItems"), self._inner(at, "items"))
        contained: tuple[Contained, ...] = ()
        if "contains" in names:
            limits: tuple[int, int | None] = (1, None)
            if "minContains" in self._known:
                limits = kw.limits({"minContains": 1, **schema}, "minContains", "maxContains")
            contained = (Contained(self._given(at, "contains"), *limits),)
        are_unique = "uniqueItems" in names and kw.value(schema, "uniqueItems", bool)
        return Arrays(*kw.limits(schema, "minItems", "maxItems"), (rule,), contained, are_unique)


def _with_members(names: tuple[str, ...]) -> ValueSet:
    """Objects with some members."""
    return ValueSet(objects=(Objects(required=names),))


def _strings(schema: dict[str, Any]) -> Strings:
    texts: list[Text] = []
    if "pattern" in schema:
        texts.append(Text("pattern", kw.value(schema, "pattern", str)))
    form = kw.value(schema, "format", str) if "format" in schema else ""
    if form in UNSUPPORTED_FORMATS:
        raise UnsupportedSchemaError(f"format {form!r} is not supported")
    if form in FORMATS:
        texts.append(Text("format", form))
    return Strings(*kw.limits(schema, "minLength", "maxLength"), tuple(texts))


def _numbers(schema: dict[str, Any], is_integer: bool | None) -> Numbers:
    multiple = kw.number(schema, "multipleOf")
    if multiple is not None and multiple <= 0:
        raise UnsupportedSchemaError("multipleOf has a value of the wrong type")
    low = _bound(schema, "minimum", "exclusiveMinimum", max)
    high = _bound(schema, "maximum", "exclusiveMaximum", min)
    return Numbers(low, high, is_integer, () if multiple is None else (multiple,))


def _bound(
    schema: dict[str, Any], inclusive: str, exclusive: str, tighter: Callable[..., Decimal]
) -> Bound | None:
    value = kw.number(schema, inclusive)
    bound = None if value is None else Bound(value, False)
    if isinstance(flag := schema.get(exclusive), bool):  # draft 4: whether it excludes the bound
        return bound and Bound(bound.value, flag)
    other = kw.number(schema, exclusive)
    if other is None or (bound and tighter(bound.value, other) != other):
        return bound
    return Bound(other, True)
