"""Patterns in the syntax of Rust's regex -> minimal automata over bytes.

Owns the compilation: by outlines-core, in this process for patterns of ours and in a process with
limits for those of requests, and the cache of what was compiled. Pure: no vLLM, no torch.

outlines-core's index over a vocabulary of the 256 single bytes *is* an automaton over bytes, UTF-8
included; it takes 0.05 to 0.2 ms for patterns typical of schemas (dates, e-mail addresses, UUIDs).
interegular, the alternative, works on characters, in Python, and took 10 to 30 times as long. Most
patterns tell 40 to 70 classes of bytes apart: the vocabulary holds one byte of each.

A request's pattern may need an automaton of any size, such as `(a|b)*a(a|b){40}`, and Rust cannot
be interrupted: `regex_worker.py` compiles it in a process that can be killed.
"""

from __future__ import annotations

import operator
import re
import threading
from collections import OrderedDict
from functools import lru_cache

import numpy as np

from sgl_vllm.fsm.byte_dfa import MAX_STATES, ByteDfa, minimal
from sgl_vllm.fsm.characters import MARK
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedPatternError
from sgl_vllm.fsm.worker import Worker, WorkerFailedError, WorkerUnavailableError

TIMEOUT_S = 2.0
WORKER_MEMORY_BYTES = 1 << 30
TOO_COMPLEX, UNSUPPORTED = 1, 2
"""What the worker answers, if not 0."""

_MAX_HEADER = 2 + 1 + 256 + 1
"""Numbers before the table of an answer, without those of final states."""

_MAX_CACHED = 2_000
_MAX_CACHED_STATES = 100_000


@lru_cache(maxsize=512)
def compile_trusted(rust_regex: str) -> ByteDfa:
    """The minimal automaton of a pattern of our own, compiled in this process."""
    return _from_bytes(build(rust_regex))


def compile_untrusted(rust_regex: str) -> ByteDfa:
    """The minimal automaton of a request's pattern, compiled in a process with limits; cached.

    Raises:
        UnsupportedPatternError: outlines-core refuses the pattern, or nothing matches it.
        TooComplexError: it needs more than `MAX_STATES` states, `TIMEOUT_S` or
            `WORKER_MEMORY_BYTES`.
    """
    with _cache_lock:
        known = _cache.get(rust_regex)
        if known is not None:
            _cache.move_to_end(rust_regex)
            return known
    dfa = _from_bytes(_build_in_worker(rust_regex))
    with _cache_lock:
        _cache[rust_regex] = dfa
        if len(_cache) > _MAX_CACHED or sum(map(_num_states, _cache.values())) > _MAX_CACHED_STATES:
            for _ in range(len(_cache) // 2):
                _cache.popitem(last=False)
    return dfa


_cache: OrderedDict[str, ByteDfa] = OrderedDict()
_cache_lock = threading.Lock()
_num_states = operator.attrgetter("num_states")

_worker = Worker("sgl_vllm.fsm.regex_worker", timeout_s=TIMEOUT_S, memory_bytes=WORKER_MEMORY_BYTES)


def start_worker() -> None:
    """Start the process for requests' patterns in the background, before the first of them."""
    _worker.start_ahead()


def _build_in_worker(rust_regex: str) -> bytes:
    try:
        status, answer = _worker.ask(rust_regex.encode())
    except (WorkerFailedError, WorkerUnavailableError) as error:
        raise TooComplexError(f"compiling the pattern {error}") from None
    if status == TOO_COMPLEX:
        raise TooComplexError(answer.decode())
    if status == UNSUPPORTED:
        raise UnsupportedPatternError(answer.decode())
    return answer


def build(rust_regex: str) -> bytes:
    """Compile with outlines-core, in this process.

    Returns: int32 [states, start, final..., -1], then the first byte of each class of bytes, -1,
        and the (states, classes) transition table.

    Raises: as `compile_untrusted`.
    """
    from outlines_core import Index, Vocabulary

    # Two things around the pattern. The end anchor: without it outlines-core takes what matches
    # first for all that matches, `a` for `a|ab`. One character before everything, which no pattern
    # contains: with the anchor, a pattern that may be empty has no start state of its own; and
    # outlines-core also determinizes the search that may begin anywhere, which has 2**n states
    # where a pattern can begin again within itself, as `a[a-z]{0,20}` can.
    anchored = rf"{MARK}(?:{rust_regex})\z"
    firsts = _first_bytes(MARK + rust_regex)
    try:
        index = Index(anchored, Vocabulary(256, {bytes([b]): [b] for b in firsts}))
    except Exception as error:
        raise UnsupportedPatternError(str(error)) from None
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    start = index.get_initial_state()
    for byte in MARK.encode():
        following = index.get_next_state(start, byte)
        if following is None:
            raise UnsupportedPatternError("nothing matches the pattern")
        transitions.pop(start, None)
        start = following
    numbers: dict[int, int] = {start: 0}
    for state, targets in transitions.items():
        numbers.setdefault(state, len(numbers))
        for target in {*targets.values()}:
            numbers.setdefault(target, len(numbers))
    if len(numbers) > MAX_STATES:
        raise TooComplexError(f"the pattern needs more than {MAX_STATES} states")
    table = np.full((len(numbers), 257), -1, np.int32)  # 256 is the end of the text
    for state, targets in transitions.items():
        table[numbers[state], [*targets]] = [numbers[target] for target in targets.values()]
    final = [numbers[state] for state in index.get_final_states() if state in numbers]
    header = np.array([len(numbers), 0, *final, -1, *firsts, -1], np.int32)
    return header.tobytes() + table[:, firsts].tobytes()


_CODE = re.compile(r"\\x\{([0-9a-f]+)\}")
_ODD = re.compile(r"\\[A-Za-z0-9<>]|\(\?[^:]|\[:")
"""What may tell bytes apart that the pattern does not name: `\\d`, flags, `[:alpha:]`."""

_END_OF_LINE = ord("\n")  # `.` is any other character

_UTF8 = (0x80, 0x90, 0xA0, 0xC0, 0xC2, 0xE0, 0xE1, 0xED, 0xEE, 0xF0, 0xF1, 0xF4, 0xF5)
"""Where ranges of bytes begin that stand at the same place in characters (RFC 3629, 4)."""


def _first_bytes(rust_regex: str) -> list[int]:
    """The first byte of each class of bytes, in order. A pattern tells bytes apart only where a
    range of characters begins or ends, with a character that it names."""
    rest = rust_regex.replace("\\\\", "")  # escaped backslashes
    codes = {*_CODE.findall(rest)}
    rest = _CODE.sub("", rest)
    if _ODD.search(rest):
        return list(range(256))
    begins = {0, _END_OF_LINE, _END_OF_LINE + 1, *_UTF8}
    for char in {"\\", *rest, *[chr(int(code, 16)) for code in codes]}:
        begins.update([b for byte in char.encode(errors="surrogatepass") for b in (byte, byte + 1)])
    return sorted(begins - {256})


def _from_bytes(data: bytes) -> ByteDfa:
    numbers = np.frombuffer(bytearray(data), np.int32)  # writable: numba compiles anew for others
    num_states, start = int(numbers[0]), int(numbers[1])
    stop, end = np.flatnonzero(numbers[: num_states + _MAX_HEADER] == -1)[:2]
    accepting = np.zeros(num_states, np.bool_)
    accepting[numbers[2:stop]] = True
    firsts = numbers[stop + 1 : end]
    table = numbers[end + 1 :].reshape(num_states, len(firsts))
    classes = np.searchsorted(firsts, np.arange(256), side="right") - 1
    return minimal(ByteDfa(np.take(table, classes, axis=1), accepting, start))
