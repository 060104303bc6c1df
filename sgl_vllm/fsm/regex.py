"""Patterns -> automata over bytes.

Owns what a pattern means: Python's parser reads it, and what it has read becomes a tree with
explicit ranges of characters, so that nothing depends on another library's idea of `\\w`. Does not
own the compilation (`nfa.py`). Pure.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any  # Any: the parser's trees have no types

from sgl_vllm.fsm import characters
from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.characters import Bytes, encodings
from sgl_vllm.fsm.errors import (
    RefusedFormatError,
    TooComplexError,
    UnsupportedPatternError,
)
from sgl_vllm.fsm.nfa import cached_dfa, dfa_of
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import Choice, Node, Repetition, Spelled, Text, one_of
from sgl_vllm.fsm.syntax import Sequence as Concatenation
from sgl_vllm.protocol.anchors import BEGIN, END, AnchorError, by_requirement
from sgl_vllm.protocol.code_points import (
    Ranges,
    complement,
    intersection,
    is_surrogate,
    normalized,
)

MAX_PATTERN_CHARS = 50_000
_MAX_REPEAT = 10_000


@lru_cache(maxsize=512)
def of_pattern(pattern: str) -> ByteDfa:
    """The automaton of the texts that a pattern of ours matches, read as by `full_match`. They may
    be none."""
    return dfa_of(_whole(pattern))


def full_match(pattern: str) -> ByteDfa:
    """The automaton of the texts that `pattern` matches as a whole, which is what vLLM's `regex`
    asks for.

    `.` is any character, `\\d`, `\\w` and `\\s` are those of ASCII and the no-break space, as in
    vLLM's default backend. `^`, `$`, `\\A` and `\\Z` hold where they stand. What that backend reads
    differently from Python is left to it: classes that begin with `]` or `\\^`, octal escapes, and
    some hexadecimal ones before another hexadecimal digit.

    Raises:
        RefusedFormatError: the pattern is not compiled here, for either reason below, and that
            backend would ignore an anchor in it or take it for a letter.
        UnsupportedPatternError: the pattern has a construct that is not regular here, or nothing
            matches it.
        TooComplexError: it needs more states or time than allowed.
    """
    try:
        return _cached(pattern, _whole)
    except (UnsupportedPatternError, TooComplexError) as error:
        if _has_unread_anchor(pattern):
            raise RefusedFormatError(str(error)) from None
        raise


def _has_unread_anchor(pattern: str) -> bool:
    try:
        return _has_inner_anchor(_parse(_TOKEN.sub(_without_name, pattern)))
    except (UnsupportedPatternError, TooComplexError, RecursionError):
        return False


def json_string_search(pattern: str) -> ByteDfa:
    """The automaton of JSON strings, quotes included, in whose value `pattern` is found somewhere:
    JSON schema's `pattern`, as ECMA-262 reads it. `.` is any character but the four ends of lines,
    `\\d` and `\\w` are those of ASCII, `\\s` is any whitespace of Unicode.

    Raises: as `full_match`, and UnsupportedPatternError for syntax that Python reads differently.
    """
    return _cached(pattern, _found_in_json)


def _cached(pattern: str, tree: Callable[[str], Node]) -> ByteDfa:
    dfa = cached_dfa((tree, pattern), lambda: dfa_of(tree(pattern)), len(pattern))
    if dfa.is_empty:
        raise UnsupportedPatternError("nothing matches the pattern")
    return dfa


def _whole(pattern: str) -> Node:
    pattern = _as_python_writes_it(pattern, _XGRAMMAR_TOKEN, _XGRAMMAR_ESCAPE)
    return _anchored(_parse(pattern), _NO_TEXT, _AS_IS)


def _found_in_json(pattern: str) -> Node:
    pattern = _as_python_writes_it(pattern, _ECMA_TOKEN, _ECMA_ESCAPE)
    anything = Repetition(_in_json(characters.ANY), 0, None)
    return Concatenation((_QUOTE, _anchored(_parse(pattern), anything, _ECMA_IN_JSON), _QUOTE))


def _parse(pattern: str) -> list[Any]:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise TooComplexError(f"the pattern has more than {MAX_PATTERN_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre_parser.parse(pattern)
    except RecursionError:
        raise TooComplexError("the pattern is nested too deeply") from None
    except Exception as error:
        raise UnsupportedPatternError(f"not a regular expression: {error}") from None
    if parsed.state.flags & ~sre.SRE_FLAG_UNICODE:
        raise UnsupportedPatternError("flags inside the pattern")
    return list(parsed)


def _anchored(items: list[Any], anything: Node, reader: _Reader) -> Node:
    """The pattern with `anything` before and after it, except where an anchor stands."""
    try:
        options = [
            Concatenation(
                (
                    _NO_TEXT if required & BEGIN else anything,
                    reader.read(part),
                    _NO_TEXT if required & END else anything,
                )
            )
            for required, part in by_requirement(items).items()
        ]
    except AnchorError as error:
        raise UnsupportedPatternError(f"{error} in the pattern") from None
    except RecursionError:
        raise TooComplexError("the pattern is nested too deeply") from None
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _has_inner_anchor(items: Sequence[Any], is_first: bool = True, is_last: bool = True) -> bool:
    """Whether there is an anchor that is not at an edge, where xgrammar ignores it, or one that it
    takes for a letter."""
    for number, (op, value) in enumerate(items):
        begins, ends = is_first and number == 0, is_last and number == len(items) - 1
        if op is sre.AT and not (begins if value is sre.AT_BEGINNING else ends):
            return True
        if op is sre.AT and value not in (sre.AT_BEGINNING, sre.AT_END):
            return True
        inside: Sequence[Any] = ()
        if op is sre.BRANCH:
            inside = value[1]
        elif op is sre.SUBPATTERN:
            inside = value[-1:]
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            inside, begins, ends = value[-1:], False, False
        if any(_has_inner_anchor(part, begins, ends) for part in inside):
            return True
    return False


_TOKEN = re.compile(r"\\.|\[\^?(?P<members>(?:\\.|[^\]\\])*)\]?|\(\?<[A-Za-z_$][\w$]*>", re.DOTALL)
"""An escape, a class, or the beginning of a group with a name."""

_ECMA_TOKEN = re.compile(rf"(?P<odd>\\[aAZUN]|\{{,\d*\}}|\(\?[#P])|{_TOKEN.pattern}", re.DOTALL)
_ECMA_ESCAPE = re.compile(r"\\(?P<odd>[aAZUN])|\\.", re.DOTALL)
"""`odd` is what Python reads differently, or refuses to read in ECMA-262: `{,2}` and `\\a` are
literal there."""

_XGRAMMAR_TOKEN = re.compile(
    r"(?P<odd>\\(?:0\d|x[\da-fA-F]{3})|\[(?:\^?\]|\\(?:\^|(?:x|u00)5[eE])))" rf"|{_TOKEN.pattern}",
    re.DOTALL,
)
_XGRAMMAR_ESCAPE = re.compile(
    r"\\(?P<odd>[1-9]|0\d|(?:x(?!00)..|u(?!0000)....)(?=[\da-fA-F]|\\(?:[wd]|(?:x|u00)[3467])))|\\.",
    re.DOTALL,
)
r"""`odd` is what Python reads differently. To xgrammar, `[]` is an empty class, `[\^a]` is `[^a]`,
`[\1]` is `1`, `\01` is a NUL and `1`, `\x41b` is U+041B, and `[\u00e9a]` is U+0E9A."""

_EMPTY_CLASSES = {"[]": r"[^\s\S]", "[^]": r"[\s\S]"}
"""The classes of ECMA-262 that have no member or lack none, as Python writes them."""


def _as_python_writes_it(pattern: str, token: re.Pattern[str], escape: re.Pattern[str]) -> str:
    """The pattern without names of groups and empty classes, which Python writes in other ways.

    Args:
        token: as `_TOKEN`, and what Python reads differently as `odd`.
        escape: an escape in a class, and as `odd` what Python reads differently.

    Raises UnsupportedPatternError: something is `odd`.
    """

    def checked(found: re.Match[str]) -> str:
        escapes = escape.finditer(found["members"] or "")
        if found["odd"] or any(one["odd"] for one in escapes):
            raise UnsupportedPatternError(f"{found[0][:20]} in the pattern")
        return _EMPTY_CLASSES.get(found[0]) or _without_name(found)

    return token.sub(checked, pattern)


def _without_name(token: re.Match[str]) -> str:
    return "(?:" if token[0].startswith("(") else token[0]


def _categories(space: Ranges) -> dict[Any, Ranges]:
    return {
        sre.CATEGORY_DIGIT: characters.DIGITS,
        sre.CATEGORY_NOT_DIGIT: complement(characters.DIGITS),
        sre.CATEGORY_WORD: characters.WORD,
        sre.CATEGORY_NOT_WORD: complement(characters.WORD),
        sre.CATEGORY_SPACE: space,
        sre.CATEGORY_NOT_SPACE: complement(space),
    }


_NO_TEXT = Text(b"")
_QUOTE = Text(b'"')

_JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))
_JSON_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}


@cached_if_few
def _in_json(ranges: Ranges) -> Node:
    r"""One of some characters as it is written inside a JSON string: control characters are `\n` or
    `\u000a`, everything else is written as it is."""
    found = [one for low, high in intersection(ranges, _JSON_PLAIN) for one in encodings(low, high)]
    members = {c for low, high in ranges for c in range(low, min(high, 0x5C) + 1)}
    short = "".join([mark for code, mark in _JSON_SHORT.items() if code in members])
    found += [(*_exactly("\\"), span) for span in _spans(short)]
    for tens in "01":
        codes = [code for code in members if f"{code:02x}"[0] == tens]
        digits = "".join([f"{code & 15:x}{code & 15:X}" for code in codes])
        found += [(*_exactly(f"\\u00{tens}"), span) for span in _spans(digits)]
    return Spelled(tuple(found))


def _exactly(text: str) -> Bytes:
    return tuple([(byte, byte) for byte in text.encode()])


def _spans(members: str) -> Ranges:
    return normalized([(ord(char), ord(char)) for char in {*members}])


@dataclass(frozen=True)
class _Reader:
    """Makes a tree of what the parser has read.

    Attributes:
        one_of: a text that is any of some characters.
        any: the characters of `.`.
        categories: those of `\\d`, `\\w`, `\\s` and their complements.
    """

    one_of: Callable[[Ranges], Node]
    any: Ranges
    categories: dict[Any, Ranges]

    def read(self, items: Sequence[Any]) -> Node:
        parts = tuple([self._item(op, value) for op, value in items])
        return parts[0] if len(parts) == 1 else Concatenation(parts)

    def _item(self, op: Any, value: Any) -> Node:
        if op is sre.LITERAL:
            if is_surrogate(value):
                raise UnsupportedPatternError("a surrogate, which no text contains")
            return self.one_of(((value, value),))
        if op is sre.NOT_LITERAL:
            return self.one_of(complement(((value, value),)))
        if op is sre.ANY:
            return self.one_of(self.any)
        if op is sre.IN:
            return self.one_of(self._ranges(value))
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, items = value
            if (high if high is not sre.MAXREPEAT else low) > _MAX_REPEAT:
                raise TooComplexError(f"a repetition of more than {_MAX_REPEAT} times")
            return Repetition(self.read(items), low, None if high is sre.MAXREPEAT else high)
        if op is sre.SUBPATTERN:
            _, add_flags, del_flags, items = value
            if add_flags or del_flags:
                raise UnsupportedPatternError("flags inside the pattern")
            return self.read(items)
        if op is sre.BRANCH:
            return Choice(tuple([self.read(option) for option in value[1]]))
        raise UnsupportedPatternError(f"{str(op).lower().replace('_', ' ')} in the pattern")

    def _ranges(self, items: Sequence[Any]) -> Ranges:
        negated = False
        ranges: list[tuple[int, int]] = []
        for op, value in items:
            if op is sre.NEGATE:
                negated = True
            elif op is sre.LITERAL:
                ranges.append((value, value))
            elif op is sre.RANGE:
                ranges.append(value)
            elif op is sre.CATEGORY:
                ranges.extend(self.categories[value])
            else:
                raise UnsupportedPatternError(f"{op} in a character class")
        others = complement(normalized(ranges))
        return others if negated else complement(others)


_AS_IS = _Reader(one_of, characters.ANY, _categories(characters.SPACE))
_ECMA_IN_JSON = _Reader(_in_json, characters.ECMA_ANY, _categories(characters.ECMA_SPACE))
