"""Free text up to a word, compared with a search for the words in the text."""

from __future__ import annotations

import random
import string
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.free_text import free_text

TEXTS = st.text("ab", max_size=12).map(str.encode)
WORDS = st.lists(st.text("ab", min_size=1, max_size=4).map(str.encode), max_size=3, unique=True)


def ends_of(words: list[bytes], text: bytes) -> list[int]:
    """Where an occurrence of a word ends."""
    return [end for end in range(len(text) + 1) if text[:end].endswith(tuple(words))]


@given(WORDS, WORDS, TEXTS)
def test_a_text_ends_with_its_first_word_and_has_no_excluded_one(words, excluded, text) -> None:
    every = [*words, *excluded]
    assume(not any(a in b for a, b in permutations(every, 2)))
    found = free_text(tuple(words), frozenset(excluded))
    ends = ends_of(every, text)
    assert found.without.accepts(text) == (ends == [])
    for word, dfa in zip(words, found.until, strict=True):
        assert dfa.accepts(text) == (ends == [len(text)] and text.endswith(word))


@pytest.mark.parametrize("words", [(b"",), (b"<a>", b"a"), (b"<a>", b"<a>")])
def test_words_of_which_one_is_in_another_are_not_compiled(words) -> None:
    with pytest.raises(UnsupportedGrammarError):
        free_text(words)


def test_an_excluded_text_in_a_word_is_not_compiled() -> None:
    with pytest.raises(UnsupportedGrammarError):
        free_text((b"<a>",), frozenset([b"a"]))


def test_automata_are_shared_and_have_a_limit() -> None:
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits
    words = ["".join(rng.sample(letters, 4)).encode() for _ in range(450)]
    some = tuple(words[:30])
    found = free_text(some)
    assert found == free_text(some)
    assert found.table_bytes == sum(dfa.table_bytes for dfa in (found.without, *found.until))
    with pytest.raises(TooComplexError, match="too many texts"):
        free_text(tuple(words))
