"""Nodes to sets of values: conjunction, complement, `oneOf`, `if`.

    {"if": A, "then": B}       A and B, or not A
    {"oneOf": [A, B]}          A and not B, or B and not A
    not {"anyOf": [A, B]}      not A and not B

Owns the set of each node, and the nodes that are derived from others. The same parts give the same
node, so what a schema that contains itself derives is finite. Does not own the algebra of sets
(`value_sets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.nodes import All, AnyOf, If, Node, Not, OneOf, Reference, Unevaluated
from sgl_vllm.fsm.schema.parse import Parser
from sgl_vllm.fsm.schema.value_sets import (
    ANY,
    NEVER,
    Arrays,
    Numbers,
    Objects,
    S,
    Strings,
    ValueSet,
    complement,
    intersection,
    union,
)
from sgl_vllm.fsm.schema.workspace import MAX_DEPTH, Workspace

_INTERSECTION = 20
"""The work of intersecting two sets, in the unit of `MAX_WORK`."""

_MAX_CASES = 256
_MAX_DISJOINT_DEPTH = 8
_MAX_DISJOINT_ITEMS = 8


class _CircularError(UnsupportedSchemaError):
    """The set of a node depends on itself."""


class Algebra:
    """The sets of the nodes of one document. The same node has the same set.

    Attributes:
        draft, workspace: as of `Parser`.
        has_complements: whether a complement was needed yet.
    """

    def __init__(self, parser: Parser, workspace: Workspace) -> None:
        self.draft = parser.draft
        self.workspace = workspace
        self.has_complements = False
        self._target = parser.target
        self._all: dict[tuple[Node, ...], Node] = {}
        self._not: dict[Node, Node] = {}
        self._known: dict[tuple[Node, bool], ValueSet] = {}
        self._open: set[tuple[Node, bool]] = set()
        """The nodes whose sets are being computed."""

    # -- derived nodes

    def follow(self, node: Node) -> Node:
        """The node behind references."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, Reference):
                return node
            node = self._target(node)
        raise UnsupportedSchemaError("references in a circle")

    def all_of(self, parts: Iterable[Node]) -> Node:
        """The values that are valid against all parts."""
        some = [part for part in parts if part is not ANY]
        if len(some) < 2:
            return some[0] if some else ANY
        flat = self._flat(some)
        if NEVER in flat:
            return NEVER
        return flat[0] if len(flat) == 1 else self._all.setdefault(flat, All(flat))

    def not_of(self, node: Node) -> Node:
        """The values that are invalid against a node."""
        node = self.follow(node)
        if isinstance(node, Not):
            return node.node
        if node is ANY or node is NEVER:
            return NEVER if node is ANY else ANY
        return self._not.setdefault(node, Not(node))

    def _flat(self, parts: Iterable[Node]) -> tuple[Node, ...]:
        """Parts that are neither references nor conjunctions."""
        found: dict[Node, None] = {}
        outer: set[Node] = set()

        def add(part: Node) -> None:
            part = self.follow(part)
            if not isinstance(part, All):
                found[part] = None
                return
            if part in outer:
                raise _CircularError("a conjunction that contains itself")
            outer.add(part)
            for inner in part.parts:
                add(inner)
            outer.remove(part)

        for part in parts:
            add(part)
        self.workspace.spend(len(found))
        return tuple(found)

    # -- sets

    def of(self, node: Node, *, annotated: bool = False) -> ValueSet:
        """The values that are valid against a node.

        Args:
            annotated: tell values apart by what is evaluated in them (`MemberRule.evaluates`).

        Raises UnsupportedSchemaError: no set says so, or it depends on itself.
        """
        if isinstance(node, ValueSet):
            return node
        key = node, annotated
        known = self._known.get(key)
        if known is not None:
            return known
        if key in self._open:
            raise _CircularError("a schema that refers to itself")
        self._open.add(key)
        try:
            with self.workspace.inside(node.place):
                known = self._known[key] = self._of(node, annotated)
        finally:
            self._open.remove(key)
        return known

    def _of(self, node: Node, annotated: bool) -> ValueSet:
        match node:
            case ValueSet():
                return node
            case Reference():
                return self.of(self.follow(node), annotated=annotated)
            case All():
                return self._of_all(node, annotated)
            case AnyOf():  # A = A or B says nothing of A but B
                branches = [one for one in map(self.follow, node.branches) if one is not node]
                sets = [self.of(branch, annotated=annotated) for branch in branches]
                return self._annotated_union(sets) if annotated else union(sets)
            case OneOf():
                return self._exclusive(ANY, node.branches, annotated)
            case If():
                return self._of_if(node, annotated)
            case Not():
                self.has_complements = True
                inner = self.follow(node.node)
                if isinstance(inner, All):
                    return union([self.of(self.not_of(one)) for one in self._flat([inner])])
                return complement(self.of(inner), self.not_of, self._spend)
            case Unevaluated():
                return self._of_unevaluated(node)

    def _of_all(self, node: All, annotated: bool) -> ValueSet:
        parts = self._flat([node])
        self._all.setdefault(parts, node)
        values = ANY
        for part in parts:
            if not isinstance(part, OneOf):
                values = self._both(values, self.of(part, annotated=annotated))
        for part in parts:
            if isinstance(part, OneOf):
                values = self._exclusive(values, part.branches, annotated)
        return values

    def _of_if(self, node: If, annotated: bool) -> ValueSet:
        if node.then is ANY and node.otherwise is ANY and not annotated:
            return ANY
        met = self.of(self.all_of([node.condition, node.then]), annotated=annotated)
        unmet = self.all_of([self.not_of(node.condition), node.otherwise])
        return union([met, self.of(unmet, annotated=annotated)], absorbs=not annotated)

    def _of_unevaluated(self, node: Unevaluated) -> ValueSet:
        values = self.of(node.base, annotated=True)
        objects, arrays = values.objects, values.arrays
        if node.members is not None:
            objects = tuple([one.unevaluated(node.members) for one in objects])
        if node.items is not None:
            with_contained = self.draft >= 2020
            arrays = tuple([one.unevaluated(node.items, with_contained) for one in arrays])
        return replace(values, objects=objects, arrays=arrays)

    def _annotated_union(self, sets: Sequence[ValueSet]) -> ValueSet:
        """The union of sets, and where values of one may evaluate what those of another do not,
        their intersection: in its values, both are evaluated."""
        found = NEVER
        for one in sets:
            both = self._both(_evaluating(found), _evaluating(one))
            found = union([found, one, both], absorbs=False)
            if max(len(found.objects), len(found.arrays)) > _MAX_CASES:
                raise UnsupportedSchemaError("unevaluated members or items in too many cases")
        return found

    def _both(self, a: ValueSet, b: ValueSet) -> ValueSet:
        return intersection(a, b, self._spend)

    def _spend(self, num_pairs: int) -> None:
        self.workspace.spend(_INTERSECTION * num_pairs)

    # -- oneOf

    def _exclusive(
        self, beside: ValueSet, branches: Sequence[Node], annotated: bool = False
    ) -> ValueSet:
        """Of the values of `beside`, those of each branch, less those of the others. What stands
        beside `oneOf` may be what tells its branches apart."""
        found = [self._both(beside, self.of(one, annotated=annotated)) for one in branches]
        overlaps: list[list[Node]] = [[] for _ in branches]
        for i, a in enumerate(found):
            for j, b in enumerate(found[:i]):
                if not self._are_disjoint(a, b, 0):
                    overlaps[i].append(branches[j])
                    overlaps[j].append(branches[i])
        for i, others in enumerate(overlaps):
            for other in others:
                if isinstance(self.follow(other), All):
                    found[i] = self._both(found[i], self.of(self.not_of(other)))
                else:
                    found[i] = self._minus(found[i], self.of(other))
        return union(found, absorbs=not annotated)

    def _minus(self, a: ValueSet, b: ValueSet) -> ValueSet:
        """The values of `a` that are not in `b`."""
        return ValueSet(
            self._difference(a.objects, b.objects, lambda one: one.complement(self.not_of)),
            self._difference(a.arrays, b.arrays, lambda one: one.complement(self.not_of)),
            self._difference(a.strings, b.strings, Strings.complement),
            self._difference(a.numbers, b.numbers, Numbers.complement),
            a.atoms - b.atoms,
        )

    def _difference(
        self, a: tuple[S, ...], b: tuple[S, ...], complement: Callable[[S], Iterable[S]]
    ) -> tuple[S, ...]:
        found: list[S] = list(a)
        for other in b:
            ways: tuple[S, ...] | None = None
            less: list[S] = []
            for one in found:
                if self._are_apart(one, other, 0):
                    less.append(one)
                    continue
                if ways is None:
                    self.has_complements = True
                    ways = tuple(complement(other))
                self._spend(len(ways))
                less += [both for way in ways if (both := one & way) is not None]
            found = list(dict.fromkeys(less))
        return tuple(found)

    def _are_disjoint(self, a: ValueSet, b: ValueSet, depth: int) -> bool:
        """Whether no value is known to be in both sets."""
        return (
            not a.atoms & b.atoms
            and all(self._are_apart(x, y, depth) for x in a.strings for y in b.strings)
            and all(self._are_apart(x, y, depth) for x in a.numbers for y in b.numbers)
            and all(self._are_apart(x, y, depth) for x in a.arrays for y in b.arrays)
            and all(self._are_apart(x, y, depth) for x in a.objects for y in b.objects)
        )

    def _are_apart(self, a: S, b: S, depth: int) -> bool:
        """As `_are_disjoint`: also if a required member or an item differs, or one set requires
        what the other forbids."""
        self.workspace.spend(1)
        pairs: list[tuple[Node, Node]] = []
        if isinstance(a, Objects) and isinstance(b, Objects):
            if _forbids(a, b) or _forbids(b, a):
                return True
            names = [name for name in a.required if name in b.required]
            pairs = [(self._listed(a, name), self._listed(b, name)) for name in names]
        elif isinstance(a, Arrays) and isinstance(b, Arrays):
            size, all_of = min(a.low, b.low, _MAX_DISJOINT_ITEMS), self.all_of
            items = [[all_of([r.at(i) for r in one.rules]) for i in range(size)] for one in (a, b)]
            pairs = list(zip(*items, strict=True))
        for x, y in pairs if depth < _MAX_DISJOINT_DEPTH else ():
            try:
                if ANY not in (x, y) and self._are_disjoint(self.of(x), self.of(y), depth + 1):
                    return True
            except _CircularError:
                continue
        return (a & b) is None

    def _listed(self, objects: Objects, name: str) -> Node:
        """What the rules say of a member that they list."""
        found = [rule.properties[name] for rule in objects.rules if name in rule.properties]
        return found[0] if len(found) == 1 else self.all_of(found)


def _forbids(a: Objects, b: Objects) -> bool:
    """Whether `b` requires a property that `a` does not allow."""
    for rule in a.rules:
        if rule.is_closed and any(name not in rule.properties for name in b.required):
            return True
    return False


def _evaluating(values: ValueSet) -> ValueSet:
    """The objects and arrays of which members or items are evaluated."""
    return ValueSet(
        tuple([one for one in values.objects if any(rule.evaluates for rule in one.rules)]),
        tuple([one for one in values.arrays if one.rules or one.contained]),
    )
