r"""Python's regular expressions, written so that every server reads them as Python does.

    \Aa[\d]{,2}?(?P<last>.)\Z     a[0-9٠-٩…]{0,2}[^\n]

Servers differ in what `\d` and `.` are, in anchors, in escapes by number, and in how a class may
begin. What is written here has none of these: explicit classes, groups without a name, and no
anchor. Python's own parser reads a pattern, and its own matcher tells which characters a class has.

A text is generated for the whole pattern, so a lazy repetition allows what a greedy one does.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any  # Any: the parser's trees have no types

from sgl_vllm.protocol.anchors import AnchorError, Items, by_requirement, compiled, subpattern
from sgl_vllm.protocol.code_points import Ranges, complement, is_surrogate

_REFUSED = {
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.GROUPREF: "a back reference",
    sre.GROUPREF_EXISTS: "a condition on a group",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive repetition",
}
"""Constructs that are not regular, or that only affect how a match is searched for."""

_REFUSED_FLAGS = re.MULTILINE | re.LOCALE
_REFUSED_FLAGS_MESSAGE = "the flag m is not supported"  # Python refuses L itself
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY)


@lru_cache(maxsize=512)
def rewritten(pattern: str) -> str:
    """A pattern that matches the same whole texts, for any server.

    Cost: 0.1 ms for a short pattern, and some 30 ms for each new class, such as `\\w`, or letter
    without case.

    Raises:
        ValueError: Python does not take the pattern, or it has a construct that is not supported.
            The message names it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre_parser.parse(pattern)
        if parsed.state.flags & _REFUSED_FLAGS:
            raise ValueError(_REFUSED_FLAGS_MESSAGE)
        items = _explicit(parsed, parsed.state.flags)
        options = by_requirement(items, ends_before_newline=True).values()
        written = dict.fromkeys(text for text in map(_written, options) if text is not None)
    except RecursionError:
        raise ValueError("regex: the pattern is nested too deeply") from None
    except (AnchorError, re.error, ValueError) as error:
        raise ValueError(f"regex: {error}: {pattern!r}") from None
    if not written:
        raise ValueError(f"regex: no text matches the pattern: {pattern!r}")
    return "|".join(written)


# -- characters -----------------------------------------------------------------------------------


def _explicit(items: Iterable[Any], flags: int) -> Items:
    """The items without groups, and with a class of ranges for what stands for one character."""
    found: Items = []
    for op, value in items:
        if op is sre.SUBPATTERN:
            _, added, removed, inside = value
            if added & _REFUSED_FLAGS:
                raise ValueError(_REFUSED_FLAGS_MESSAGE)
            if added & sre_parser.TYPE_FLAGS:  # one of `a`, `u` and `L`
                removed |= sre_parser.TYPE_FLAGS
            found += _explicit(inside, flags & ~removed | added)
        else:
            found.append(_explicit_item(op, value, flags))
    return found


def _explicit_item(op: Any, value: Any, flags: int) -> tuple[Any, Any]:
    if op in _REFUSED:
        raise ValueError(f"{_REFUSED[op]} is not supported")
    if op in _CHARACTERS:
        ranges = _characters(op, value, flags)
        return sre.IN, [(sre.RANGE, one) for one in ranges]
    if op is sre.BRANCH:
        return op, (None, [subpattern(_explicit(option, flags)) for option in value[1]])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, inside = value
        return sre.MAX_REPEAT, (low, high, subpattern(_explicit(inside, flags)))
    return op, value  # an anchor


def _characters(op: Any, value: Any, flags: int) -> Ranges:
    if op is sre.LITERAL and not flags & re.IGNORECASE:
        return () if is_surrogate(value) else ((value, value),)
    if op is sre.IN:
        value = tuple(value)
    return _matched(op, value, flags & (re.IGNORECASE | re.DOTALL | re.ASCII | re.UNICODE))


@lru_cache(maxsize=256)
def _matched(op: Any, value: Any, flags: int) -> Ranges:
    """The characters that a part of a pattern matches, as Python finds them."""
    inside = subpattern([(op, [*value] if op is sre.IN else value)])
    runs = compiled([(sre.MAX_REPEAT, (1, sre.MAXREPEAT, inside))], flags)
    found = [run[0] for run in runs.finditer(_all_characters())]
    others = complement([(ord(run[0]), ord(run[-1])) for run in found])
    return complement(others)  # without surrogates, which a run may cross


@cache
def _all_characters() -> str:
    return "".join([chr(code) for low, high in complement(()) for code in range(low, high + 1)])


# -- writing --------------------------------------------------------------------------------------


def _written(items: Iterable[Any]) -> str | None:
    """The items as a pattern; None if nothing matches them."""
    texts = []
    for op, value in items:
        text = _written_item(op, value)
        if text is None:
            return None
        texts.append(text)
    return "".join(texts)


def _written_item(op: Any, value: Any) -> str | None:
    if op is sre.IN:
        return _written_class([one for _, one in value]) if value else None
    if op is sre.BRANCH:
        options = dict.fromkeys(text for text in map(_written, value[1]) if text is not None)
        texts = "|".join(filter(None, options))
        if not texts:
            return "" if options else None
        return f"(?:{texts})" + ("?" if "" in options else "")
    low, high, inside = value
    text = _written(inside)
    if not text or high == 0:
        return "" if text == "" or low == 0 else None
    is_one = len(inside) == 1 and inside[0][0] in (sre.IN, sre.BRANCH) and text[-1] != "?"
    return (text if is_one else f"(?:{text})") + _written_count(low, high)


def _written_count(low: int, high: int) -> str:
    if high is sre.MAXREPEAT:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if low == high:
        return "" if low == 1 else f"{{{low}}}"
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _written_class(ranges: Sequence[tuple[int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0], r"\.^$*+?{}[]|()")
    others = complement(ranges)
    if others and len(others) < len(ranges):
        return f"[^{_members(others)}]"
    return f"[{_members(ranges)}]"


def _members(ranges: Sequence[tuple[int, int]]) -> str:
    """The inside of a class. A caret is never its first character, which xgrammar takes for a
    negation even if it is escaped."""
    pieces = []
    for low, high in ranges:
        if low == ord("^") < high:
            pieces += [(low + 1, high), (low, low)]
        else:
            pieces.append((low, high))
    if pieces[0] == (ord("^"), ord("^")):
        pieces = [*pieces[1:], pieces[0]]
    return "".join([_written_range(low, high) for low, high in pieces])


def _written_range(low: int, high: int) -> str:
    first, last = (_escaped(code, r"\[]^-") for code in (low, high))
    return first if low == high else first + ("-" if high > low + 1 else "") + last


def _escaped(code: int, special: str) -> str:
    character = chr(code)
    known = {"\0": r"\u0000", "\t": r"\t", "\n": r"\n", "\r": r"\r"}.get(character)
    return known or ("\\" + character if character in special else character)
