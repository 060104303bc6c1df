"""Objects: which members they have, and which values these.

Owns `properties`, `required`, `additionalProperties`, `patternProperties`, `propertyNames`,
`minProperties` and `maxProperties`, and members that must be invalid against one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Alt, Expression, Seq, literal
from sgl_vllm.fsm.schema.context import Compiled, Context
from sgl_vllm.fsm.schema.keywords import Schema, several
from sgl_vllm.fsm.schema.members import Member, Members
from sgl_vllm.fsm.schema.rules import Region, Rule, Rules
from sgl_vllm.fsm.schema.siblings import rules_of
from sgl_vllm.fsm.schema.values import limits
from sgl_vllm.fsm.schema.workspace import ids

MAX_COUNTED_PROPERTIES = 1_000


def compile_object(context: Context, schema: dict[str, Any]) -> Compiled:
    """The objects that are valid against `schema`, with the listed properties in their order."""
    objects = _Objects(context, schema)
    ways: list[list[int]] = []
    expressions: list[Expression] = []
    for kind in objects.kinds():
        try:
            expressions.append(objects.expression(kind))
        except NothingValidError:
            continue
        ways.append(ids(*[kind.members[name] for name in kind.required]))
    if not expressions:
        raise NothingValidError("no object is valid")
    inside = expressions[0] if len(expressions) == 1 else Alt(expressions)
    return Compiled(Seq(literal(b"{"), context.blank, inside), ways)


class _Kind(NamedTuple):
    """Objects that are invalid against each of the rules that they must break, in one way each.

    Attributes:
        members: the schemas of the listed members.
        required: those that must be there.
        broken: rules that the value of a member that is not listed breaks.
    """

    members: dict[str, Schema]
    required: dict[str, None]
    broken: list[Rule]


class _Objects:
    """The objects of one schema."""

    def __init__(self, context: Context, schema: dict[str, Any]) -> None:
        self._context = context
        self._schema = schema
        self._kept = rules_of(schema)
        self._broken: tuple[Rule, ...] = several(schema, "not")
        self._rules = Rules(context, (*self._kept, *self._broken))
        self._required = dict.fromkeys(schema.get("required", []))
        names = [n for rule in self._kept for n in rule.get("properties", ())]
        others = [n for rule in self._broken for n in rule.get("properties", ())]
        self._names = dict.fromkeys([*names, *self._required, *others])
        self._regions = self._make_regions()

    def kinds(self) -> Iterator[_Kind]:
        """All objects, by the ways to break the rules below `not`."""
        members = {name: self._of_name(name) for name in self._names}
        if not self._broken:
            yield _Kind(members, self._required, [])
            return
        for choice in product(*[self._ways_to_break(rule) for rule in self._broken]):
            self._context.workspace.spend(1 + len(members))
            kind = _Kind({**members}, {**self._required}, [])
            for rule, (name, invalid) in zip(self._broken, choice, strict=True):
                if name is None:
                    kind.broken.append(rule)
                else:
                    kind.members[name] = self._both(kind.members[name], invalid)
                    kind.required[name] = None
            yield kind

    def expression(self, kind: _Kind) -> Expression:
        """The objects of one kind, from their opening brace on."""
        context = self._context
        members: list[Member] = []
        for name, schema in kind.members.items():
            value = None if schema is False else context.value_if_any(schema)
            if value is not None:
                members.append(Member(name, value, name in kind.required))
            elif name in kind.required:
                raise NothingValidError("a required property for which nothing is valid")
        others = self._others([])
        last = self._others(kind.broken) if kind.broken else None
        if kind.broken and last is None:
            raise NothingValidError("no member may be invalid")
        has_others = others is not None or last is not None
        low, high = limits(self._schema, "minProperties", "maxProperties")
        num_required = len(kind.required) + (last is not None)
        if high is not None and high < max(low, num_required):
            raise NothingValidError("maxProperties is too low")
        if low > len(members) + has_others:
            error = UnsupportedSchemaError if has_others else NothingValidError
            raise error("minProperties is too high")
        if low <= num_required:
            low = 0
        if high is not None and high >= len(members) and not has_others:
            high = None
        if max(low, high or 0) > MAX_COUNTED_PROPERTIES:
            raise UnsupportedSchemaError(
                f"more than {MAX_COUNTED_PROPERTIES:,} properties to count"
            )
        return Members(context, members, others, low, high, last).after(0, 0)

    def _ways_to_break(self, rule: Rule) -> list[tuple[str | None, Schema]]:
        """The listed members whose value may break a rule, with the schema of such values; None for
        a member that is not listed."""
        invalid = {n: self._complement(self._rules.of_name(rule, n)) for n in self._names}
        ways = [(name, schema) for name, schema in invalid.items() if schema is not False]
        return [*ways, (None, True)]

    def _of_name(self, name: str) -> Schema:
        if len(self._kept) == 1:
            return self._rules.of_name(self._kept[0], name)
        return self._all([self._rules.of_name(rule, name) for rule in self._kept])

    def _others(self, broken: Sequence[Rule]) -> Expression | None:
        """A member that is not listed and breaks the given rules; None if there may be none."""
        options: list[Expression] = []
        for region in self._regions:
            schemas = [self._rules.of_region(rule, region) for rule in self._kept]
            schemas += [self._complement(self._rules.of_region(rule, region)) for rule in broken]
            schema = self._all(schemas)
            value = None if schema is False else self._context.value_if_any(schema)
            if value is not None:
                options.append(Seq(region.key, self._context.colon, value))
        if not options:
            return None
        return options[0] if len(options) == 1 else Alt(options)

    def _make_regions(self) -> list[Region]:
        rule = self._kept[0]
        if rule.get("additionalProperties") is False and not rule.get("patternProperties"):
            return []
        return self._rules.regions(self._names)

    def _complement(self, schema: Schema) -> Schema:
        return self._context.workspace.keep(self._context.complement(schema))

    def _all(self, schemas: Sequence[Schema]) -> Schema:
        whole = schemas[0]
        for schema in schemas[1:]:
            whole = self._both(whole, schema)
        return whole

    def _both(self, a: Schema, b: Schema) -> Schema:
        return self._context.both(a, b)
