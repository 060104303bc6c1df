"""Free text that ends where one of several words is completed, and contains no excluded word.

Owns the automata of such texts (Aho and Corasick, "Efficient string matching", 1975). Does not own
what follows a word (`grammar_compiler.py`). Pure.

    words <a>, </b>      x < < a >        the text that ends with its first <a>
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa, minimal
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.nfa import cached_dfa

MAX_WORD_BYTES = 2_000
"""Of all words and excluded words of one text together."""

MAX_TABLE_BYTES = 32 << 20
"""What the automata of one text, or of all parts of one tag, may take. In a text, each word has its
own, with a state for each byte of all words."""


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
    """The texts up to the first of `words`. Bitmasks of free text are shared between grammars,
    because the same arguments have the same automata, as long as they are known (`cached_dfa`).

    Raises:
        UnsupportedGrammarError: a word is empty, or part of another one.
        TooComplexError: the words together are longer than `MAX_WORD_BYTES`, or their automata
            larger than `MAX_TABLE_BYTES`.
    """
    every = (*words, *sorted(excluded))
    if b"" in every or any(a in b for a, b in permutations(every, 2)):
        raise UnsupportedGrammarError("a text that ends free text is empty, or part of another one")
    num_characters = sum(map(len, every))
    if num_characters > MAX_WORD_BYTES:
        raise TooComplexError("the texts that end free text are too long together")
    matcher = cache(lambda: _Matcher(every))

    def ending(word: bytes | None) -> ByteDfa:
        return cached_dfa((every, word), lambda: matcher().ending(word), num_characters)

    without, until = ending(None), []
    num_bytes = without.table_bytes
    for word in words:
        until.append(ending(word))
        num_bytes += until[-1].table_bytes
        if num_bytes > MAX_TABLE_BYTES:
            raise TooComplexError("free text ends in too many texts")
    return FreeText(without, tuple(until), num_bytes)


def begins_in(word: bytes, end: bytes) -> bool:
    """Whether a text may complete `word` within `end`, having begun it before: an end of `word`
    begins `end`. Then the first `word` is not where text up to `end` ends."""
    return any(word.endswith(end[:length]) for length in range(1, min(len(word), len(end))))


class _Matcher:
    """Finds the first of some words. A state is the longest end of the text that begins a word."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        children: list[dict[int, int]] = [{}]
        self._completed: dict[bytes, int] = {}  # the state in which each word is complete
        for word in words:
            state = 0
            for byte in word:
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                state = children[state][byte]
            self._completed[word] = state
        letters = sorted({byte for word in words for byte in word})
        self._columns = np.full(256, len(letters))
        self._columns[letters] = np.arange(len(letters))
        table = np.zeros((len(children), len(letters) + 1), np.int32)
        shorter = [0] * len(children)  # for each state, that of the longest proper end of its text
        queue = deque([0])
        while queue:
            state = queue.popleft()
            if state:
                table[state] = table[shorter[state]]
            for byte, child in children[state].items():
                column = self._columns[byte]
                shorter[child] = int(table[state, column])
                table[state, column] = child
                queue.append(child)
        table[[*self._completed.values()]] = -1
        self._table = table

    def ending(self, word: bytes | None) -> ByteDfa:
        """The texts that end with a word and have none before; those without any if it is None."""
        accepting = np.full(len(self._table), word is None)
        accepting[[*self._completed.values()]] = False
        if word is not None:
            accepting[self._completed[word]] = True
        return minimal(ByteDfa(self._table, self._columns, accepting))
