"""Sets of JSON values: what a schema admits, by type.

    {"minLength": 2}         all objects, arrays, numbers, true, false and null; Strings(low=2)
    not {"minLength": 2}     Strings(high=1)

A `ValueSet` is in disjunctive normal form: of each type it has the union of several sets, each of
which is a conjunction of constraints. Owns their algebra: `a & b` is the intersection, or None if
it is visibly empty; `complement` gives sets whose union is the complement. Subschemas inside them
stay nodes, so a set can contain itself. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar  # Any: JSON values that a schema lists

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.formats import EXACT_FORMATS
from sgl_vllm.fsm.schema.nodes import AnyOf, Node, Placed

H = TypeVar("H", bound=Hashable)


class Text(NamedTuple):
    """A constraint of strings: the keyword `pattern` or `format`, and its value."""

    keyword: str
    value: str


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings of `low` to `high` characters (None: any number).

    Attributes:
        matched, unmatched: the patterns and formats that they match, and that they do not.
        values: the only ones, if they are listed. excluded: those that are not in the set.
    """

    low: int = 0
    high: int | None = None
    matched: tuple[Text, ...] = ()
    unmatched: tuple[Text, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()

    def __and__(self, other: Strings) -> Strings | None:
        low, high = max(self.low, other.low), _least(self.high, other.high)
        values, excluded = _listing(self.values, other.values, self.excluded, other.excluded)
        if values == () or (high is not None and high < low):
            return None
        matched = _joined(self.matched, other.matched)
        unmatched = _joined(self.unmatched, other.unmatched)
        return Strings(low, high, matched, unmatched, values, excluded)

    def complement(self) -> Iterable[Strings]:
        yield from [Strings(low, high) for low, high in _outside(self.low, self.high)]
        for text in self.matched:
            if text.keyword == "format" and text.value not in EXACT_FORMATS:
                raise UnsupportedSchemaError(f"format {text.value!r} below not")
            yield Strings(unmatched=(text,))
        yield from [Strings(matched=(text,)) for text in self.unmatched]
        if self.values is not None:
            yield Strings(excluded=self.values)
        if self.excluded:
            yield Strings(values=self.excluded)


class Bound(NamedTuple):
    """A bound of numbers. `is_strict`: the bound itself is excluded."""

    value: Decimal
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from `low` to `high` (None: no bound).

    Attributes:
        is_integer: whether they are integers; None: both are in the set.
        multiples, no_multiples: what they are multiples of, and what not.
        values, excluded: as of `Strings`.
    """

    low: Bound | None = None
    high: Bound | None = None
    is_integer: bool | None = None
    multiples: tuple[Decimal, ...] = ()
    no_multiples: tuple[Decimal, ...] = ()
    values: tuple[int | float, ...] | None = None
    excluded: tuple[int | float, ...] = ()

    def __and__(self, other: Numbers) -> Numbers | None:
        low = max(filter(None, (self.low, other.low)), default=None)
        highs = filter(None, (self.high, other.high))
        high = min(highs, key=lambda bound: (bound.value, not bound.is_strict), default=None)
        if low is not None and high is not None:
            is_strict = low.is_strict or high.is_strict
            if low.value > high.value or (low.value == high.value and is_strict):
                return None
        kinds = {self.is_integer, other.is_integer} - {None}
        values, excluded = _listing(self.values, other.values, self.excluded, other.excluded)
        if values == () or len(kinds) == 2:
            return None
        multiples = _joined(self.multiples, other.multiples)
        no_multiples = _joined(self.no_multiples, other.no_multiples)
        is_integer = kinds.pop() if kinds else None
        return Numbers(low, high, is_integer, multiples, no_multiples, values, excluded)

    def complement(self) -> Iterable[Numbers]:
        if self.low is not None:
            yield Numbers(high=Bound(self.low.value, not self.low.is_strict))
        if self.high is not None:
            yield Numbers(low=Bound(self.high.value, not self.high.is_strict))
        if self.is_integer is not None:
            yield Numbers(is_integer=not self.is_integer)
        yield from [Numbers(no_multiples=(one,)) for one in self.multiples]
        yield from [Numbers(multiples=(one,)) for one in self.no_multiples]
        if self.values is not None:
            yield Numbers(excluded=self.values)
        if self.excluded:
            yield Numbers(values=self.excluded)


@dataclass(frozen=True, eq=False, slots=True)
class MemberRule:
    """What each member of an object must be valid against, by its name: `properties`,
    `patternProperties`, and `additionalProperties` as `rest` (None: not given). Or `names`, which
    all names must be valid against: `propertyNames`. `evaluates`: whether its members count as
    evaluated, which those below `not` do not."""

    properties: Mapping[str, Node] = field(default_factory=dict)
    patterns: Mapping[str, Node] = field(default_factory=dict)
    rest: Node | None = None
    names: Node | None = None
    evaluates: bool = True

    @property
    def is_closed(self) -> bool:
        """Whether only members of `properties` are allowed."""
        return self.rest is NEVER and not self.patterns

    def unlisted(self) -> Iterable[MemberRule]:
        """The rule in parts, each of which constrains members other than those of `properties`."""
        yield from [MemberRule(patterns={p: n}) for p, n in self.patterns.items() if n is not ANY]
        if self.rest not in (None, ANY):
            names, patterns = dict.fromkeys(self.properties, ANY), dict.fromkeys(self.patterns, ANY)
            yield MemberRule(names, patterns, self.rest)
        if self.names not in (None, ANY):
            yield MemberRule(names=self.names)


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of `low` to `high` members (None: any number), among them those `required`. They
    satisfy all `rules`, and each rule of `broken` is broken by some member."""

    low: int = 0
    high: int | None = None
    required: tuple[str, ...] = ()
    rules: tuple[MemberRule, ...] = ()
    broken: tuple[MemberRule, ...] = ()

    def __and__(self, other: Objects) -> Objects | None:
        low, high = max(self.low, other.low), _least(self.high, other.high)
        if high is not None and high < low:
            return None
        required = _joined(self.required, other.required)
        rules, broken = _joined(self.rules, other.rules), _joined(self.broken, other.broken)
        return Objects(low, high, required, rules, broken)

    def complement(self, not_of: Callable[[Node], Node]) -> Iterable[Objects]:
        yield from [Objects(low, high) for low, high in _outside(self.low, self.high)]
        yield from [Objects(rules=(MemberRule({name: NEVER}),)) for name in self.required]
        for rule in self.rules:
            for name, node in rule.properties.items():
                if node is not ANY:
                    invalid = MemberRule({name: not_of(node)}, evaluates=False)
                    yield Objects(required=(name,), rules=(invalid,))
            yield from [Objects(broken=(part,)) for part in rule.unlisted()]
        yield from [Objects(rules=(replace(rule, evaluates=False),)) for rule in self.broken]

    def unevaluated(self, node: Node) -> Objects:
        """These objects, if their members that no rule evaluates are valid against `node`."""
        rules = [rule for rule in self.rules if rule.evaluates]
        if any(rule.rest is not None for rule in rules):
            return self
        names = dict.fromkeys([name for rule in rules for name in rule.properties], ANY)
        patterns = dict.fromkeys([pattern for rule in rules for pattern in rule.patterns], ANY)
        return replace(self, rules=(*self.rules, MemberRule(names, patterns, node)))


@dataclass(frozen=True, eq=False, slots=True)
class ItemRule:
    """What each item of an array must be valid against: `first` for the first ones, `rest` for all
    others (None: not given). `evaluates`: as of `MemberRule`."""

    first: tuple[Node, ...] = ()
    rest: Node | None = None
    evaluates: bool = True

    def at(self, index: int) -> Node:
        return self.first[index] if index < len(self.first) else self.rest or ANY


@dataclass(frozen=True, slots=True)
class Contained:
    """From `low` to `high` items (None: any number), of those from index `start` on, are valid
    against `node`. `evaluates`: as of `MemberRule`."""

    node: Node
    low: int
    high: int | None
    start: int = 0
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays of `low` to `high` items (None: any number), which satisfy all of `rules` and of
    `contained`. `are_unique`: whether no two items are equal; otherwise, they may be."""

    low: int = 0
    high: int | None = None
    rules: tuple[ItemRule, ...] = ()
    contained: tuple[Contained, ...] = ()
    are_unique: bool = False

    def __and__(self, other: Arrays) -> Arrays | None:
        low, high = max(self.low, other.low), _least(self.high, other.high)
        if high is not None and high < low:
            return None
        rules = _joined(self.rules, other.rules)
        contained = _joined(self.contained, other.contained)
        return Arrays(low, high, rules, contained, self.are_unique or other.are_unique)

    def complement(self, not_of: Callable[[Node], Node]) -> Iterable[Arrays]:
        if self.are_unique:
            raise UnsupportedSchemaError("uniqueItems below not")
        yield from [Arrays(low, high) for low, high in _outside(self.low, self.high)]
        for rule in self.rules:
            for i, node in enumerate(rule.first):
                if node is not ANY:
                    invalid = ItemRule((*[ANY] * i, not_of(node)), evaluates=False)
                    yield Arrays(low=i + 1, rules=(invalid,))
            if rule.rest is not None and rule.rest is not ANY:
                others = Contained(not_of(rule.rest), 1, None, len(rule.first), evaluates=False)
                yield Arrays(contained=(others,))
        for one in self.contained:
            for low, high in _outside(one.low, one.high):
                yield Arrays(contained=(Contained(one.node, low, high, one.start, False),))

    def unevaluated(self, node: Node, with_contained: bool) -> Arrays:
        """These arrays, if their items that no rule evaluates are valid against `node`.

        Args:
            with_contained: whether `contains` evaluates items.
        """
        rules = [rule for rule in self.rules if rule.evaluates]
        if any(rule.rest is not None for rule in rules):
            return self
        contained = [one.node for one in self.contained if one.evaluates and with_contained]
        item = AnyOf((node, *contained)) if contained else node
        size = max([len(rule.first) for rule in rules], default=0)
        return replace(self, rules=(*self.rules, ItemRule((ANY,) * size, item)))


@dataclass(frozen=True, eq=False, slots=True)
class ValueSet(Placed):
    """A set of JSON values: of each type, the union of the given sets. As a node: the values that
    are valid."""

    objects: tuple[Objects, ...] = ()
    arrays: tuple[Arrays, ...] = ()
    strings: tuple[Strings, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    atoms: frozenset[bool | None] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether it is visibly empty."""
        return not (self.objects or self.arrays or self.strings or self.numbers or self.atoms)


ATOMS = (True, False, None)
ANY = ValueSet((Objects(),), (Arrays(),), (Strings(),), (Numbers(),), frozenset(ATOMS))
"""Invariant of all sets: if they have all values of a type, its field is that of this set."""

NEVER = ValueSet()


def listed(values: Iterable[Any], *, place: str | None = None) -> ValueSet:
    """Some JSON values. Objects and arrays are described by their members and items."""
    objects: list[Objects] = []
    arrays: list[Arrays] = []
    strings: dict[str, None] = {}
    numbers: dict[int | float, None] = {}
    atoms: set[bool | None] = set()
    for value in values:
        if isinstance(value, str):
            strings[value] = None
        elif value is None or isinstance(value, bool):
            atoms.add(value)
        elif isinstance(value, dict):
            rule = MemberRule({name: listed([v]) for name, v in value.items()}, rest=NEVER)
            objects.append(Objects(required=tuple(value), rules=(rule,)))
        elif isinstance(value, list):
            items = ItemRule(tuple([listed([item]) for item in value]))
            arrays.append(Arrays(len(value), len(value), (items,)))
        elif isinstance(value, int | float):
            numbers[value] = None
        else:
            raise UnsupportedSchemaError("a value that JSON does not have")
    return ValueSet(
        tuple(objects),
        tuple(arrays),
        (Strings(values=tuple(strings)),) if strings else (),
        (Numbers(values=tuple(numbers)),) if numbers else (),
        frozenset(atoms),
        place=place,
    )


def intersection(
    a: ValueSet, b: ValueSet, spend: Callable[[int], None], *, place: str | None = None
) -> ValueSet:
    """The values of both sets.

    Args:
        spend: called with the number of pairs of sets before they are intersected.
    """
    return ValueSet(
        _products(a.objects, b.objects, ANY.objects, spend),
        _products(a.arrays, b.arrays, ANY.arrays, spend),
        _products(a.strings, b.strings, ANY.strings, spend),
        _products(a.numbers, b.numbers, ANY.numbers, spend),
        a.atoms & b.atoms,
        place=place,
    )


def union(sets: Iterable[ValueSet], *, absorbs: bool = True) -> ValueSet:
    """The values of any of the sets.

    Args:
        absorbs: whether a set of all values of a type replaces the others of this type.
    """
    parts = [one for one in sets if not one.is_empty]
    if len(parts) == 1:
        return parts[0]
    whole = ANY if absorbs else NEVER
    return ValueSet(
        _distinct([x for one in parts for x in one.objects], whole.objects),
        _distinct([x for one in parts for x in one.arrays], whole.arrays),
        _distinct([x for one in parts for x in one.strings], whole.strings),
        _distinct([x for one in parts for x in one.numbers], whole.numbers),
        frozenset().union(*[one.atoms for one in parts]),
    )


def complement(
    values: ValueSet, not_of: Callable[[Node], Node], spend: Callable[[int], None]
) -> ValueSet:
    """All other values.

    Args:
        not_of: a node of the values that are invalid against one.
        spend: as of `intersection`.

    Raises UnsupportedSchemaError: no set says so.
    """
    objects = [one.complement(not_of) for one in values.objects]
    arrays = [one.complement(not_of) for one in values.arrays]
    return ValueSet(
        _common(objects, ANY.objects, spend),
        _common(arrays, ANY.arrays, spend),
        _common([one.complement() for one in values.strings], ANY.strings, spend),
        _common([one.complement() for one in values.numbers], ANY.numbers, spend),
        ANY.atoms - values.atoms,
    )


S = TypeVar("S", Objects, Arrays, Strings, Numbers)


def _common(
    unions: list[Iterable[S]], everything: tuple[S, ...], spend: Callable[[int], None]
) -> tuple[S, ...]:
    """The intersection of several unions."""
    found = everything
    for sets in unions:
        found = _products(found, tuple(sets), everything, spend)
    return found


def _products(
    a: tuple[S, ...], b: tuple[S, ...], everything: tuple[S, ...], spend: Callable[[int], None]
) -> tuple[S, ...]:
    """The intersection of two unions."""
    if a is everything or a is b:
        return b
    if b is everything:
        return a
    spend(len(a) * len(b))
    return tuple(dict.fromkeys([both for x in a for y in b if (both := x & y) is not None]))


def _distinct(sets: Iterable[S], whole: tuple[S, ...]) -> tuple[S, ...]:
    found = tuple(sets)
    if len(found) == 1:
        return whole if whole and found[0] is whole[0] else found
    return whole if whole and whole[0] in found else tuple(dict.fromkeys(found))


def _joined(a: tuple[H, ...], b: tuple[H, ...]) -> tuple[H, ...]:
    if not (a and b):
        return a or b
    return a if a is b else tuple(dict.fromkeys((*a, *b)))


def _least(a: int | None, b: int | None) -> int | None:
    return min(a, b) if a is not None and b is not None else b if a is None else a


def _outside(low: int, high: int | None) -> Iterable[tuple[int, int | None]]:
    """The ranges of counts below and above a range."""
    if low:
        yield 0, low - 1
    if high is not None:
        yield high + 1, None


def _listing(
    a: tuple[H, ...] | None, b: tuple[H, ...] | None, out_a: tuple[H, ...], out_b: tuple[H, ...]
) -> tuple[tuple[H, ...] | None, tuple[H, ...]]:
    """The listed values (None: all) and the excluded ones of an intersection."""
    excluded = _joined(out_a, out_b)
    values = b if a is None else a
    if values is None:
        return None, excluded
    if a is not None and b is not None:
        among = {*b}
        values = tuple([value for value in a if value in among])
    if excluded:
        without = {*excluded}
        values = tuple([value for value in values if value not in without])
    return values, ()
