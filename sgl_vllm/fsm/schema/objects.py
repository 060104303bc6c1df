"""Objects: which members they have, and which values these.

    {"properties": {"a": A}, "patternProperties": {"^x": B}, "additionalProperties": R}

    "a": A      names that begin with x: B      all others: R

Several such rules may constrain one object, and patterns may overlap. So names that are not listed
are divided into *regions*, in each of which all members are constrained by the same nodes.

Owns these, required members, and members that must break a rule. Does not own the order of members
(`members.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression, Seq, literal
from sgl_vllm.fsm.json_string import NAME_STRING, STRING, JsonString
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.schema import scalars
from sgl_vllm.fsm.schema.context import Compiled, Context, alternatives, spelled, string
from sgl_vllm.fsm.schema.members import Member, Members
from sgl_vllm.fsm.schema.nodes import Node
from sgl_vllm.fsm.schema.value_sets import ANY, NEVER, MemberRule, Objects

MAX_COUNTED_PROPERTIES = 1_000
_MAX_REGIONS = 64


_Region = tuple[Expression, frozenset[ByteDfa]]
"""A name that no rule lists; and the automata that accept it, the same ones for all these names."""


class _Kind(NamedTuple):
    """Objects that break each of the rules that they must break, in one way each.

    Attributes:
        members: the nodes of the named members.
        required: those that must be there.
        broken: rules that a member breaks that is not named.
    """

    members: dict[str, Node]
    required: dict[str, None]
    broken: list[MemberRule]


def compile_object(context: Context, objects: Objects) -> Compiled | None:
    """The objects of a set."""
    compiler = _Objects(context, objects)
    found = [(compiler.expression(kind), kind) for kind in compiler.kinds()]
    inside = alternatives([expression for expression, _ in found if expression is not None])
    if inside is None:
        return None
    ways = [[kind.members[n] for n in kind.required] for one, kind in found if one is not None]
    return Compiled(Seq(literal(b"{"), context.blank, inside), ways)


class _Objects:
    """The objects of one set."""

    def __init__(self, context: Context, objects: Objects) -> None:
        self._context = context
        self._objects = objects
        self._all_of = context.algebra.all_of
        rules = (*objects.rules, *objects.broken)
        named = [name for rule in objects.rules for name in rule.properties]
        others = [name for rule in objects.broken for name in rule.properties]
        self._named = dict.fromkeys([*named, *objects.required, *others])
        patterns = dict.fromkeys([pattern for rule in rules for pattern in rule.patterns])
        self._patterns = {p: context.workspace.pattern(p) for p in patterns}
        self._names = {r: scalars.names(context, r.names) for r in rules if r.names is not None}
        is_closed = any(rule.is_closed for rule in objects.rules)
        self._regions = [] if is_closed else self._find_regions()

    def kinds(self) -> Iterator[_Kind]:
        """All objects, by the ways to break the rules that they must break."""
        rules, broken = self._objects.rules, self._objects.broken
        if len(rules) == 1:
            members = {name: self._of_name(rules[0], name) for name in self._named}
        else:
            members = {n: self._all_of([self._of_name(r, n) for r in rules]) for n in self._named}
        required = dict.fromkeys(self._objects.required)
        if not broken:
            yield _Kind(members, required, [])
            return
        for choice in product(*[self._ways_to_break(rule) for rule in broken]):
            self._context.workspace.spend(1 + len(members))
            kind = _Kind({**members}, {**required}, [])
            for rule, (name, invalid) in zip(broken, choice, strict=True):
                if name is None:
                    kind.broken.append(rule)
                else:
                    kind.members[name] = self._all_of([kind.members[name], invalid])
                    kind.required[name] = None
            yield kind

    def _ways_to_break(self, rule: MemberRule) -> list[tuple[str | None, Node]]:
        """The named members whose value may break a rule, with the node of such values; None for a
        member that is not named."""
        not_of = self._context.algebra.not_of
        invalid = [(name, not_of(self._of_name(rule, name))) for name in self._named]
        return [*[way for way in invalid if way[1] is not NEVER], (None, ANY)]

    def expression(self, kind: _Kind) -> Expression | None:
        """The objects of one kind, from their opening brace on; None if there are none."""
        context = self._context
        members: list[Member] = []
        for name, node in kind.members.items():
            value = context.value(node)
            if value is not None:
                members.append(Member(name, value, name in kind.required))
            elif name in kind.required:
                return None
        others = self._others([])
        last = self._others(kind.broken) if kind.broken else None
        if kind.broken and last is None:
            return None
        has_others = others is not None or last is not None
        low, high = self._objects.low, self._objects.high
        num_required = len(kind.required) + (last is not None)
        if high is not None and high < max(low, num_required):
            return None
        if low > len(members) + has_others:
            if has_others:
                raise UnsupportedSchemaError("minProperties is too high")
            return None
        if low <= num_required:
            low = 0
        if high is not None and high >= len(members) and not has_others:
            high = None
        if max(low, high or 0) > MAX_COUNTED_PROPERTIES:
            raise UnsupportedSchemaError(
                f"more than {MAX_COUNTED_PROPERTIES:,} properties to count"
            )
        return Members(context, members, others, low, high, last).start

    def _others(self, broken: Sequence[MemberRule]) -> Expression | None:
        """A member that is not named and breaks the given rules; None if there may be none."""
        context, not_of = self._context, self._context.algebra.not_of
        options: list[Expression] = []
        for key, matched in self._regions:
            nodes = [self._says(rule, matched.__contains__) for rule in self._objects.rules]
            nodes += [not_of(self._says(rule, matched.__contains__)) for rule in broken]
            value = context.value(self._all_of(nodes))
            if value is not None:
                options.append(Seq(key, context.colon, value))
        return alternatives(options)

    def _of_name(self, rule: MemberRule, name: str) -> Node:
        """What a rule says of a named member."""
        listed = rule.properties.get(name)
        if not rule.patterns and rule.names is None:
            return listed or rule.rest or ANY
        text = spelled(name)
        return self._says(rule, lambda dfa: dfa.accepts(text), listed)

    def _says(
        self, rule: MemberRule, accepts: Callable[[ByteDfa], bool], listed: Node | None = None
    ) -> Node:
        """What a rule says of members, by whether an automaton accepts their names."""
        if rule.names is not None and not accepts(self._names[rule]):
            return NEVER
        found = [node for p, node in rule.patterns.items() if accepts(self._patterns[p])]
        found += [] if listed is None else [listed]
        return self._all_of(found) if found else rule.rest or ANY

    def _find_regions(self) -> list[_Region]:
        """All names that are not named by a rule."""
        names = sorted({spelled(name) for name in self._named})
        automata = [*self._patterns.values(), *self._names.values()]
        if not automata:
            # A named member must not come back in another spelling.
            inner = Names.of(name[1:-1] for name in names)
            key = string(JsonString.of(STRING if inner is None else NAME_STRING, names=inner))
            return [(key, frozenset())]
        common, texts = self._context.workspace.common, self._context.workspace.texts
        regions: list[tuple[ByteDfa, frozenset[ByteDfa]]] = [(scalars.any_text(), frozenset())]
        for dfa in automata:
            inside = [(common(region, dfa), matched | {dfa}) for region, matched in regions]
            outside = [(common(region, dfa, minus=True), matched) for region, matched in regions]
            regions = [region for region in (*inside, *outside) if not region[0].is_empty]
            if len(regions) > _MAX_REGIONS:
                raise UnsupportedSchemaError("patternProperties that overlap in too many ways")
        named = [[name for name in names if region.accepts(name)] for region, _ in regions]
        rest = [
            (common(region, texts(known), minus=True) if known else region, matched)
            for known, (region, matched) in zip(named, regions, strict=True)
        ]
        return [(region.expression, matched) for region, matched in rest if not region.is_empty]
