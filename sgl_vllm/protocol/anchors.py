r"""Anchors of a pattern, resolved: what is left has none, and is told where in the text it holds.

    (^a|b)c      `ac` if the text begins there; `bc` anywhere
    a(b|$c?)     `a`  if the text ends there;   `ab` anywhere

Owns that. Does not own how a pattern is written (Python's parser reads it), nor what becomes of the
trees. Pure.
"""

from __future__ import annotations

import itertools
import re
import re._compiler as sre_compiler  # type: ignore[import-not-found]
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import Any  # Any: the parser's trees have no types

Items = list[tuple[Any, Any]]
"""The parsed items of a pattern, or of a part of it."""

BEGIN, END, _BEFORE_NEWLINE = 1, 2, 4
"""What a part may require, as flags: that the text begins before it, that it ends after it, that
only a newline follows it."""

ByRequirement = dict[int, Items]
"""The texts of a part that require the same. None of them has an anchor."""

_ANCHORS = {
    sre.AT_BEGINNING: BEGIN,
    sre.AT_BEGINNING_STRING: BEGIN,
    sre.AT_END: END,
    sre.AT_END_STRING: END,
}
_GROUPS = (sre.SUBPATTERN, sre.MAX_REPEAT, sre.MIN_REPEAT)
_NEWLINE = (sre.IN, [(sre.RANGE, (10, 10))])
_MAX_ANCHORS = 100
_MAX_COPIED = 5_000
"""Items that are copied: a group with an anchor that is repeated, or of which one option has an
anchor, leaves copies of what stands beside it."""


class AnchorError(ValueError):
    """An anchor stands where it is not resolved. The message says which."""


def by_requirement(items: Iterable[Any], *, ends_before_newline: bool = False) -> ByRequirement:
    r"""What a pattern matches, divided by what it requires of its place in the text: flags of
    `BEGIN` and `END`. Nothing at all is an empty dictionary.

    Args:
        ends_before_newline: `$` also matches before a newline that ends the text, as in Python.

    Cost: linear in the items, with anchors too as long as they are not repeated or optional.

    Raises:
        AnchorError: there is `\b` or `\B`; a part that may be an anchor alone is repeated twice or
            more; or there are too many anchors.
        RecursionError: the pattern has no anchor, and is nested too deeply.
    """
    num_anchors = _num_anchors(items := [*items])
    if not num_anchors:
        return {0: items}
    if num_anchors > _MAX_ANCHORS:
        raise AnchorError("too many anchors")
    try:
        found = _Resolver(ends_before_newline, _MAX_COPIED + 2 * _num_items(items)).sequence(items)
    except RecursionError:
        raise AnchorError("too many anchors") from None
    return {required: found[required] for required in (0, 1, 2, 3) if required in found}


class _Resolver:
    def __init__(self, ends_before_newline: bool, max_items: int) -> None:
        self._ends_before_newline = ends_before_newline
        self._max_items = max_items

    def sequence(self, items: Iterable[Any]) -> ByRequirement:
        found: ByRequirement = {0: []}
        for op, value in items:
            found = self._followed(found, self._item(op, value))
        return found

    def _followed(self, before: ByRequirement, parts: ByRequirement) -> ByRequirement:
        """What begins with `before`, which is used up."""
        if parts.keys() == {0} and not any(earlier & (END | _BEFORE_NEWLINE) for earlier in before):
            for prefix in before.values():
                prefix += parts[0]
            return before
        found: ByRequirement = {}
        for required, part in parts.items():
            for earlier, prefix in before.items():
                if required & BEGIN and not _may_be_empty(prefix):
                    continue
                start = [] if required & BEGIN else prefix
                if not earlier & (END | _BEFORE_NEWLINE):
                    self._add(found, earlier | required, [*start, *part])
                elif _may_be_empty(part):
                    self._add(found, earlier | required, start)
                if earlier & _BEFORE_NEWLINE and compiled(part).fullmatch("\n"):
                    self._add(found, earlier & BEGIN | END | required, [*start, _NEWLINE])
        return self._of_bounded_size(found)

    def _of_bounded_size(self, found: ByRequirement) -> ByRequirement:
        if sum(map(_num_items, found.values())) > self._max_items:
            raise AnchorError("too many anchors")
        return found

    def _add(self, found: ByRequirement, required: int, items: Items) -> None:
        """Add texts with this requirement, unless no place can meet it."""
        if required & END and required & _BEFORE_NEWLINE:
            return
        known = found.get(required)
        if known is not None and known != items:
            items = [(sre.BRANCH, (None, [*_options(known), *_options(items)]))]
        found[required] = items

    def _item(self, op: Any, value: Any) -> ByRequirement:
        if op is sre.AT:
            if value not in _ANCHORS:
                raise AnchorError(r"\b and \B are not supported")
            if value is sre.AT_END and self._ends_before_newline:
                return {END: [], _BEFORE_NEWLINE: []}
            return {_ANCHORS[value]: []}
        if op is sre.BRANCH:
            found: ByRequirement = {}
            for option in value[1]:
                self._add_all(found, self.sequence(option))
            return found
        if op is sre.SUBPATTERN:
            _, *flags, inside = value
            return {
                required: [(op, (None, *flags, subpattern(part)))]
                for required, part in self.sequence(inside).items()
            }
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inside = value
            return self._repetition(op, low, high, self.sequence(inside))
        return {0: [(op, value)]}

    def _add_all(self, found: ByRequirement, others: ByRequirement) -> None:
        for required, part in others.items():
            self._add(found, required, part)

    def _repetition(self, op: Any, low: int, high: int, parts: ByRequirement) -> ByRequirement:
        """Only the first copy can stand where the text begins, and only the last where it ends. One
        more copy may be the newline after that."""
        everything = {required: [*part] for required, part in parts.items()}
        plain = parts.pop(0, None)
        if plain is not None and not parts:
            return {0: [(op, (low, high, subpattern(plain)))]}
        if low > 1 and any(map(_may_be_empty, parts.values())):
            raise AnchorError("an anchor that may stand alone is repeated twice or more")
        found: ByRequirement = {} if low else {0: []}
        for num_first, num_last, num_newline in itertools.product((0, 1), repeat=3):
            num_more = num_first + num_last + num_newline
            if num_more > high or num_newline > num_last:
                continue
            left_low = max(0, low - num_more)
            left_high = high if high is sre.MAXREPEAT else high - num_more
            chain: ByRequirement = {0: []}
            if num_first:
                chain = self._followed(chain, parts)
            if plain is not None and left_high:
                repeated = (op, (left_low, left_high, subpattern(plain)))
                chain = self._followed(chain, {0: [repeated]})
            elif left_low:
                continue
            if num_last:
                chain = self._followed(chain, parts)
            if num_newline:
                chain = self._followed(chain, everything)
            if num_more or plain is not None:
                self._add_all(found, chain)
        return self._of_bounded_size(found)


def _options(items: Items) -> list[Any]:
    """The options of a choice that is all there is; otherwise one."""
    return items[0][1][1] if len(items) == 1 and items[0][0] is sre.BRANCH else [subpattern(items)]


def _num_anchors(items: Iterable[Any]) -> int:
    number = 0
    for op, value in items:
        inside = value[1] if op is sre.BRANCH else value[-1:] if op in _GROUPS else ()
        number += (op is sre.AT) + sum(map(_num_anchors, inside))
    return number


def _num_items(items: Iterable[Any]) -> int:
    number = 0
    for op, value in items:
        number += 1
        if op is sre.BRANCH:
            number += sum(map(_num_items, value[1]))
        elif op in _GROUPS:
            number += _num_items(value[-1])
    return number


def _may_be_empty(items: Items) -> bool:
    return all(_item_may_be_empty(op, value) for op, value in items)


def _item_may_be_empty(op: Any, value: Any) -> bool:
    if op is sre.BRANCH:
        return any(map(_may_be_empty, value[1]))
    if op is sre.SUBPATTERN:
        return _may_be_empty(value[-1])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return value[0] == 0 or _may_be_empty(value[2])
    return False


def subpattern(items: Items) -> Any:
    """Wrap items the way Python's parser nests them."""
    return sre_parser.SubPattern(sre_parser.State(), items)


def compiled(items: Items, flags: int = 0) -> re.Pattern[str]:
    """The pattern that consists of these items."""
    pattern: re.Pattern[str] = sre_compiler.compile(subpattern(items), flags)
    return pattern
