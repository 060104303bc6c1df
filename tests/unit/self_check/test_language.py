"""Formats by listing their texts: the reference for automata and jumps, checked by hand."""

import re

import pytest
import torch

from sgl_vllm.self_check.language import Language, ListedGrammar, TokenTable

LANGUAGE = Language(("a ", ("red", "rose", "blue"), " x{}"))
VOCABULARY = [b"", b"a", b"a ", b" ", b"r", b"re", b"ed x", b"rose", b"d", b"bl", b" x", b"{}"]
VOCABULARY += [b"z"]
END = 0
TABLE = TokenTable(VOCABULARY, END, [LANGUAGE])


def test_texts_and_regex_are_the_same_format():
    assert LANGUAGE.texts == {b"a red x{}", b"a rose x{}", b"a blue x{}"}
    assert all(re.fullmatch(LANGUAGE.regex, text.decode()) for text in LANGUAGE.texts)


@pytest.mark.parametrize(
    ("begun", "forced"),
    [
        (b"", b"a "),
        (b"a ", b""),
        (b"a r", b""),
        (b"a re", b"d x{}"),
        (b"a b", b"lue x{}"),
        (b"a red x{}", b""),
        (b"b", b""),
    ],
)
def test_what_is_forced(begun, forced):
    assert LANGUAGE.forced(begun) == forced


def tokens(*pieces: bytes) -> list[int]:
    return [VOCABULARY.index(piece) for piece in pieces]


GOOD = tokens(b"a ", b"re", b"d", b" x", b"{}", b"")


@pytest.mark.parametrize(
    ("output", "places", "says"),
    [
        (GOOD, [0, 2, 3, 4, 5], None),
        (GOOD, [0, 1], "b're' was forced at token 1, not b''"),
        (tokens(b"a ", b"re", b"d", b""), [2, 3], "the end was forced at token 3"),
        (tokens(b"z", b"re", b"d"), [2], "does not fit"),
    ],
)
def test_what_a_jump_has_forced(output, places, says):
    why = TABLE.why_not_forced(LANGUAGE, output, places)
    assert why is None if says is None else says in (why or "")


def test_a_grammar_takes_texts_of_the_format_and_what_it_is_told():
    grammar = ListedGrammar(LANGUAGE, TABLE, {1: VOCABULARY.index(b"rose")})
    assert not grammar.accept_tokens("", tokens(b"a ", b"re"))
    assert grammar.validate_tokens(tokens(b"rose", b" x", b"z")) == tokens(b"rose", b" x")
    assert grammar.accept_tokens("", tokens(b"rose", b" x", b"{}", b""))
    assert grammar.is_terminated()
    grammar.rollback(1)
    mask = torch.zeros((2, 1), dtype=torch.int32)
    grammar.fill_bitmask(mask, 1)
    assert mask.tolist() == [[0], [1 << END]]
