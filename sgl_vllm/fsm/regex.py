"""Regular expressions -> minimal DFAs over bytes.

Owns: the translation of a pattern to explicit character ranges, what a pattern may cost, and the
algebra of byte DFAs. Pure: no vLLM, no torch.

The DFA itself is built by outlines-core (Rust): its index over a vocabulary of the 256 single
bytes *is* one, UTF-8 included, in 0.05 to 0.2 ms for ten patterns typical of schemas (dates,
e-mail addresses, numbers, UUIDs, ...). interegular, the other candidate, works on characters, in
Python, and took 10 to 30 times as long. Patterns are compiled with an end anchor (`\\z`): without,
outlines-core takes what matches first for all that matches, `a` for `a|ab`.

A pattern from a request may describe a DFA of any size, `(a|b)*a(a|b){40}`, and Rust cannot be
interrupted: such patterns are compiled in a process of their own, with limits of memory and time.
"""

from __future__ import annotations

import operator
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sgl_vllm.fsm import tables
from sgl_vllm.fsm.automaton import ByteDfa, TooComplexError
from sgl_vllm.fsm.worker import GaveUpError, Worker

MAX_PATTERN_CHARS = 50_000
MAX_STATES = 20_000
TIMEOUT_S = 2.0
WORKER_MEMORY_BYTES = 1 << 30
TOO_COMPLEX, UNSUPPORTED = 1, 2
"""What the worker answers, if not 0."""

_MAX_REPEAT = 10_000
_MAX_CACHED = 2_000
_MAX_CACHED_STATES = 100_000


class UnsupportedPatternError(ValueError):
    """A pattern with a construct that is not regular here (look-around, back references, ...)."""


Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends included, sorted, apart from each other; no surrogates."""

_MARK = "\U0010ffff"
_LAST = 0x10FFFE
"""The last code point but `_MARK`, which is no character and stands before patterns (`build`)."""
_SURROGATES = (0xD800, 0xDFFF)


def _normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for low, high in _normal((*ranges, _SURROGATES)):
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    if begin <= _LAST:
        found.append((begin, _LAST))
    return tuple(found)


def _intersection(a: Ranges, b: Ranges) -> Ranges:
    return _complement(_normal((*_complement(a), *_complement(b))))


_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((9, 13), (0x20, 0x20), (0xA0, 0xA0))
_ANY: Ranges = _complement(())
_CATEGORIES = {
    sre.CATEGORY_DIGIT: _DIGITS,
    sre.CATEGORY_NOT_DIGIT: _complement(_DIGITS),
    sre.CATEGORY_WORD: _WORD,
    sre.CATEGORY_NOT_WORD: _complement(_WORD),
    sre.CATEGORY_SPACE: _SPACE,
    sre.CATEGORY_NOT_SPACE: _complement(_SPACE),
}


class _Translator:
    """Writes a parsed pattern anew with explicit ranges only, in the syntax of Rust's regex."""

    def __init__(self, json_string: bool) -> None:
        self._json_string = json_string

    def write(self, items: Sequence[Any]) -> str:
        return "".join([self._item(op, value) for op, value in items])

    def _item(self, op: Any, value: Any) -> str:
        if op is sre.LITERAL:
            return self.char_class(((value, value),))
        if op is sre.NOT_LITERAL:
            return self.char_class(_complement(((value, value),)))
        if op is sre.ANY:
            return self.char_class(_ANY)
        if op is sre.IN:
            return self.char_class(self._ranges(value))
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, items = value
            if (high if high is not sre.MAXREPEAT else low) > _MAX_REPEAT:
                raise TooComplexError(f"a repetition of more than {_MAX_REPEAT} times")
            most = "" if high is sre.MAXREPEAT else str(high)
            return f"(?:{self.write(items)}){{{low},{most}}}"
        if op is sre.SUBPATTERN:
            _, add_flags, del_flags, items = value
            if add_flags or del_flags:
                raise UnsupportedPatternError("flags inside the pattern")
            return f"(?:{self.write(items)})"
        if op is sre.BRANCH:
            return "(?:" + "|".join([self.write(option) for option in value[1]]) + ")"
        raise UnsupportedPatternError(f"{str(op).lower().replace('_', ' ')} in the pattern")

    @staticmethod
    def _ranges(items: Sequence[Any]) -> Ranges:
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
                ranges.extend(_CATEGORIES[value])
            else:
                raise UnsupportedPatternError(f"{op} in a character class")
        normal = _normal(ranges)
        return _complement(normal) if negated else _complement(_complement(normal))

    def char_class(self, ranges: Ranges) -> str:
        return _json_class(ranges) if self._json_string else _bracket(ranges)


@lru_cache(maxsize=1024)
def _json_class(ranges: Ranges) -> str:
    """Any of these characters, as they are written in a JSON string."""
    options = []
    if plain := _intersection(ranges, _JSON_PLAIN):
        options.append(_bracket(plain))
    members = {c for low, high in ranges for c in range(low, min(high, 0x5C) + 1)}
    if short := [s for c, s in _JSON_SHORT.items() if c in members]:
        options.append(r"\\[" + "".join([_escaped(s) for s in short]) + "]")
    if controls := [c for c in range(0x20) if c in members]:
        if len(controls) == 0x20:
            options.append(r"\\u00[01][0-9a-fA-F]")
        else:
            codes = [f"{c >> 4}[{c & 15:x}{c & 15:X}]" for c in controls]
            options.append(r"\\u00(?:" + "|".join(codes) + ")")
    return "(?:" + "|".join(options) + ")" if options else _NOTHING


_NOTHING = r"[a&&b]"
_JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))
_JSON_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}


def _escaped(char: str) -> str:
    return "\\" + char if char in "\\[]^-&~" else char


def _bracket(ranges: Ranges) -> str:
    if not ranges:
        return _NOTHING
    return "[" + "".join([f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges]) + "]"


def _parse(pattern: str) -> Any:
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


_BEGINNING = (sre.AT, sre.AT_BEGINNING)
_END = (sre.AT, sre.AT_END)


def full_match(pattern: str) -> ByteDfa:
    """The DFA of the texts that `pattern` matches as a whole, as vLLM's `regex` means it.

    `.` is any character, `\\d`, `\\w` and `\\s` are those of ASCII and the no-break space, as in
    stock's default backend; `^` may stand first and `$` last, also in alternatives.

    Raises:
        UnsupportedPatternError: a construct that is not regular here.
        TooComplexError: more states, time or memory than allowed.
    """
    return compile_untrusted(_anchored(_parse(pattern), "", json_string=False))


def json_string_search(pattern: str) -> ByteDfa:
    """The DFA of JSON strings, quotes and all, in whose value `pattern` is found somewhere, as JSON
    schema's `pattern` means it (ECMA-262, with classes of ASCII).

    Raises: as `full_match`.
    """
    anything = f"{_json_class(_ANY)}*"
    return compile_untrusted(f'"{_anchored(_parse(pattern), anything, json_string=True)}"')


def _anchored(items: list[Any], anything: str, json_string: bool, begun: bool = False) -> str:
    """The pattern with `anything` before and after it, where no anchor stands.

    Args:
        begun: whether an anchor stands before `items`, as before the parts of `^a|^b`, which the
            parser takes for `^(a|b)`.
    """
    if items and items[0] == _BEGINNING:
        items, begun = items[1:], True
    if len(items) == 1:
        op, value = items[0]
        if op is sre.BRANCH:
            options = [_anchored(list(o), anything, json_string, begun) for o in value[1]]
            return "(?:" + "|".join(options) + ")"
        if op is sre.SUBPATTERN and not any(value[1:3]):
            return _anchored(list(value[3]), anything, json_string, begun)
    ends = bool(items) and items[-1] == _END
    inner = _write(items[:-1] if ends else items, json_string)
    return f"{'' if begun else anything}{inner}{'' if ends else anything}"


def _write(items: Sequence[Any], json_string: bool) -> str:
    try:
        return _Translator(json_string).write(items)
    except RecursionError:
        raise TooComplexError("the pattern is nested too deeply") from None


# -- building ---------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def compile_trusted(rust_regex: str) -> ByteDfa:
    """The minimal DFA of a pattern of our own, in this process."""
    return _from_bytes(build(rust_regex))


def compile_untrusted(rust_regex: str) -> ByteDfa:
    """As `compile_trusted`, of a pattern from a request: in a process with limits; cached."""
    with _cache_lock:
        known = _cache.get(rust_regex)
        if known is not None:
            _cache.move_to_end(rust_regex)
            return known
    dfa = _from_bytes(_built_elsewhere(rust_regex))
    with _cache_lock:
        _cache[rust_regex] = dfa
        if len(_cache) > _MAX_CACHED or sum(map(_num_states, _cache.values())) > _MAX_CACHED_STATES:
            for _ in range(len(_cache) // 2):
                _cache.popitem(last=False)
    return dfa


_worker = Worker("sgl_vllm.fsm.regex_worker", timeout_s=TIMEOUT_S, memory_bytes=WORKER_MEMORY_BYTES)


def _built_elsewhere(rust_regex: str) -> bytes:
    try:
        status, answer = _worker.ask(rust_regex.encode())
    except GaveUpError as error:
        raise TooComplexError(f"compiling the pattern {error}") from None
    if status == TOO_COMPLEX:
        raise TooComplexError(answer.decode())
    if status == UNSUPPORTED:
        raise UnsupportedPatternError(answer.decode())
    return answer


_cache: OrderedDict[str, ByteDfa] = OrderedDict()
_cache_lock = threading.Lock()
_num_states = operator.attrgetter("num_states")


def build(rust_regex: str) -> bytes:
    """Compile with outlines-core: int32 [states, start, final..., -1] and the transition table.

    Runs in the worker, too, which imports this module's bare needs only.
    """
    from outlines_core import Index, Vocabulary

    # The end anchor: see above. With it, a pattern that may be empty has no start state of its own,
    # hence one character before everything. It is one that patterns do not hold: outlines-core also
    # determinizes the search that may begin anywhere, and where the pattern could begin again and
    # again within itself, that one has 2**n states: `a[a-z]{0,20}`.
    anchored = rf"{_MARK}(?:{rust_regex})\z"
    try:
        index = Index(anchored, Vocabulary(256, {bytes([b]): [b] for b in range(256)}))
    except Exception as error:
        raise UnsupportedPatternError(str(error)) from None
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    start = index.get_initial_state()
    for byte in _MARK.encode():
        following = index.get_next_state(start, byte)
        if following is None:
            raise UnsupportedPatternError("nothing matches the pattern")
        transitions.pop(start, None)
        start = following
    numbers: dict[int, int] = {start: 0}
    for state, targets in transitions.items():
        numbers.setdefault(state, len(numbers))
        for target in targets.values():
            numbers.setdefault(target, len(numbers))
    if len(numbers) > MAX_STATES:
        raise TooComplexError(f"the pattern needs more than {MAX_STATES} states")
    table = np.full((len(numbers), 256), -1, np.int32)
    for state, targets in transitions.items():
        row = table[numbers[state]]
        for byte, target in targets.items():
            if byte < 256:  # 256 is the end of the text
                row[byte] = numbers[target]
    final = [numbers[state] for state in index.get_final_states() if state in numbers]
    return np.array([len(numbers), 0, *final, -1], np.int32).tobytes() + table.tobytes()


def _from_bytes(data: bytes) -> ByteDfa:
    numbers = np.frombuffer(bytearray(data), np.int32)  # for what is read-only numba compiles anew
    num_states, start = int(numbers[0]), int(numbers[1])
    stop = 2 + int(np.argmax(numbers[2:] == -1))
    accepting = np.zeros(num_states, np.bool_)
    accepting[numbers[2:stop]] = True
    table = numbers[stop + 1 :].reshape(num_states, 256)
    return minimal(ByteDfa(table, accepting, start))


# -- algebra ----------------------------------------------------------------------------------


def minimal(dfa: ByteDfa) -> ByteDfa:
    """The smallest DFA of the same language: dead and equal states go."""
    live = tables.live_states(dfa.by_class, dfa.accepting)
    if not live[dfa.start]:
        return ByteDfa(np.full((1, 256), -1, np.int32), np.zeros(1, np.bool_))
    table = np.where((dfa.by_class >= 0) & live[dfa.by_class], dfa.by_class, -1)
    block, count = tables.equal_blocks(table, dfa.accepting)
    representative = np.empty(count, np.int64)
    representative[block] = np.arange(len(block))
    smaller = table[representative]
    smaller = np.where(smaller >= 0, block[smaller], -1).astype(np.int32)
    order, number = tables.reachable(smaller, block[dfa.start])
    smaller = smaller[order]
    smaller = np.where(smaller >= 0, number[smaller], -1)
    return ByteDfa(smaller[:, dfa.classes], dfa.accepting[representative][order])


def combined(a: ByteDfa, b: ByteDfa, *, minus: bool = False) -> ByteDfa:
    """The texts of both `a` and `b`; with `minus`, those of `a` that are not of `b`.

    Raises: TooComplexError: the product has more than MAX_STATES states.
    """
    if a.num_states * b.num_states > _MAX_PRODUCT:
        raise TooComplexError("patterns together need too many states")
    joint, classes = np.unique(a.classes.astype(np.int32) * 256 + b.classes, return_inverse=True)
    # `take` gives row after row, whatever their number: for another layout numba compiles anew.
    table_a = np.take(a.by_class, joint >> 8, axis=1)
    table_b = np.take(b.by_class, joint & 255, axis=1)
    pairs, table = tables.product(table_a, a.start, table_b, b.start, not minus, MAX_STATES)
    if not len(pairs):
        raise TooComplexError(f"patterns together need more than {MAX_STATES} states")
    accepting_b = np.where(pairs[:, 1] >= 0, b.accepting[pairs[:, 1]], False)
    accepting = a.accepting[pairs[:, 0]] & (~accepting_b if minus else accepting_b)
    return minimal(ByteDfa(table[:, classes.reshape(-1)], accepting))


_MAX_PRODUCT = 50_000_000


def is_empty(dfa: ByteDfa) -> bool:
    return not dfa.accepting.any()
