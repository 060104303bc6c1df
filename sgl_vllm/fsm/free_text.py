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
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedTagError

MAX_WORD_BYTES = 2_000
"""Of all words and excluded words of one text together."""


@dataclass(frozen=True)
class FreeText:
    """The automata of one kind of free text.

    Attributes:
        without: texts that contain none of the words.
        until: for each word, the texts that end with it and contain none before.
    """

    without: ByteDfa
    until: tuple[ByteDfa, ...]


@lru_cache(maxsize=64)
def free_text(words: tuple[bytes, ...], excluded: frozenset[bytes] = frozenset()) -> FreeText:
    """The texts up to the first of `words`. The same automata for the same arguments, so that
    bitmasks of free text are shared between grammars.

    Raises:
        UnsupportedTagError: a word is empty, or part of another one.
        TooComplexError: the words together are longer than `MAX_WORD_BYTES`.
    """
    every = (*words, *sorted(excluded))
    if b"" in every or any(a in b for a, b in permutations(every, 2)):
        raise UnsupportedTagError("a text that ends free text is empty, or part of another one")
    if sum(map(len, every)) > MAX_WORD_BYTES:
        raise TooComplexError("the texts that end free text are too long together")
    table, completed = _matcher(every)
    inside = ~np.isin(np.arange(len(table)), completed)
    until = [_ending(table, inside, [state]) for state in completed[: len(words)]]
    return FreeText(_ending(table, inside, np.flatnonzero(inside).tolist()), tuple(until))


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
