"""Free text that ends where one of several words is completed, and contains no excluded word.

Owns the automata of such texts (Aho and Corasick, "Efficient string matching", 1975). Does not own
what follows a word (`structural_tag.py`). Pure.

    words <a>, </b>      x < < a >        the text that ends with its first <a>
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.byte_dfa import ByteDfa, minimal
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError

MAX_WORD_BYTES = 2_000
"""Of all words and excluded words of one text together."""

MAX_TABLE_BYTES = 32 << 20
"""What the automata of one text, or of all parts of one tag, may take. In a text, each word has its
own, with a state for each byte of all words."""

_MAX_KEPT_BYTES = 256 << 10
_MAX_KEPT = 64
_BYTES_PER_ENTRY = 12
"""Of a table, as `ByteDfa.table_bytes` counts."""


@dataclass(frozen=True)
class FreeText:
    """The automata of one kind of free text.

    Attributes:
        without: texts that contain none of the words.
        until: for each word, the texts that end with it and contain none before.
        table_bytes: what their tables take.
    """

    without: ByteDfa
    until: tuple[ByteDfa, ...]
    table_bytes: int


def free_text(words: tuple[bytes, ...], excluded: frozenset[bytes] = frozenset()) -> FreeText:
    """The texts up to the first of `words`. The same automata for the same arguments, so that
    bitmasks of free text are shared between grammars, if they are small: those of the latest 64
    arguments are kept, of at most 256 KiB each.

    Raises:
        UnsupportedGrammarError: a word is empty, or part of another one.
        TooComplexError: the words together are longer than `MAX_WORD_BYTES`, or their automata
            larger than `MAX_TABLE_BYTES`.
    """
    text = b"".join((*words, *excluded))
    num_entries = (len(text) + 1) * (len({*text}) + 1)  # of a table: its states, and bytes
    most = (len(words) + 1) * num_entries * _BYTES_PER_ENTRY
    return (_kept if most <= _MAX_KEPT_BYTES else _free_text)(words, excluded)


def _free_text(words: tuple[bytes, ...], excluded: frozenset[bytes]) -> FreeText:
    every = (*words, *sorted(excluded))
    if b"" in every or any(a in b for a, b in permutations(every, 2)):
        raise UnsupportedGrammarError("a text that ends free text is empty, or part of another one")
    if sum(map(len, every)) > MAX_WORD_BYTES:
        raise TooComplexError("the texts that end free text are too long together")
    table, completed = _matcher(every)
    inside = ~np.isin(np.arange(len(table)), completed)
    without = _ending(table, inside, np.flatnonzero(inside).tolist())
    num_bytes, until = without.table_bytes, []
    for state in completed[: len(words)]:
        until.append(_ending(table, inside, [state]))
        num_bytes += until[-1].table_bytes
        if num_bytes > MAX_TABLE_BYTES:
            raise TooComplexError("free text ends in too many texts")
    return FreeText(without, tuple(until), num_bytes)


_kept = lru_cache(maxsize=_MAX_KEPT)(_free_text)


def begins_in(word: bytes, end: bytes) -> bool:
    """Whether a text may complete `word` within `end`, having begun it before: an end of `word`
    begins `end`. Then the first `word` is not where text up to `end` ends."""
    return any(word.endswith(end[:length]) for length in range(1, min(len(word), len(end))))


def _ending(table: NDArray[np.int32], inside: NDArray[np.bool_], last: list[int]) -> ByteDfa:
    """The texts that end in one of the states `last`, and are `inside` before."""
    accepting = np.zeros(len(table), np.bool_)
    accepting[last] = True
    table = np.where((inside | accepting)[table], table, -1)
    table[~inside] = -1
    return minimal(ByteDfa.of_table(table, accepting))


def _matcher(words: tuple[bytes, ...]) -> tuple[NDArray[np.int32], list[int]]:
    """The table of states, each the longest end of the text that begins a word; and the state in
    which each word is complete."""
    children: list[dict[int, int]] = [{}]
    completed = []
    for word in words:
        state = 0
        for byte in word:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
        completed.append(state)
    table = np.zeros((len(children), 256), np.int32)
    shorter = [0] * len(children)  # for each state, that of the longest proper end of its text
    queue = deque([0])
    while queue:
        state = queue.popleft()
        if state:
            table[state] = table[shorter[state]]
        for byte, child in children[state].items():
            shorter[child] = int(table[state, byte])
            table[state, byte] = child
            queue.append(child)
    return table, completed
