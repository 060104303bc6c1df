"""Formats by listing their texts: the reference for automata and jumps, checked by hand."""

import re

import pytest

from sgl_vllm.self_check.canaries import FORMATS
from sgl_vllm.self_check.language import Language, TokenTable, why_not_forced, why_not_in

LANGUAGE = Language(("a ", ("red", "rose", "blue"), " x{}"))
VOCABULARY = [b"", b"a", b"a ", b" ", b"r", b"re", b"ed x", b"rose", b"d", b"bl", b" x", b"{}"]
VOCABULARY += [b"z"]
END = 0
TABLE = TokenTable(VOCABULARY, [LANGUAGE])


def test_texts_and_regex_are_the_same_format():
    assert LANGUAGE.texts == {b"a red x{}", b"a rose x{}", b"a blue x{}"}
    assert all(re.fullmatch(LANGUAGE.regex, text.decode()) for text in LANGUAGE.texts)


@pytest.mark.parametrize("language", FORMATS, ids=str)
def test_the_formats_of_canaries_leave_a_choice_and_force_the_rest(language):
    assert all(re.fullmatch(language.regex, text.decode()) for text in language.texts)
    assert len(language.texts) >= 8
    assert max(map(len, language.texts)) < 160


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


def test_legal_tokens_lead_to_a_text():
    pieces = {VOCABULARY[token] for token in TABLE.legal(LANGUAGE, b"a ")}
    assert pieces == {b"r", b"re", b"rose", b"bl"}
    assert TABLE.legal(LANGUAGE, b"q") == set()


def tokens(*pieces: bytes) -> list[int]:
    return [VOCABULARY.index(piece) for piece in pieces]


GOOD = tokens(b"a ", b"re", b"d", b" x", b"{}", b"")


def test_a_text_of_the_format():
    assert why_not_in(LANGUAGE, TABLE, {END}, GOOD) is None
    assert "does not fit" in (why_not_in(LANGUAGE, TABLE, {END}, GOOD[:3]) or "")


@pytest.mark.parametrize(
    ("output", "runs", "says"),
    [
        (GOOD, [(0, 1), (2, 6)], None),
        (GOOD, [(0, 2)], "forced at token 0"),
        (tokens(b"a ", b"re", b"d", b""), [(2, 4)], "the end was forced after token 3"),
        (tokens(b"z", b"re", b"d"), [(2, 3)], "does not fit"),
    ],
)
def test_what_a_jump_has_forced(output, runs, says):
    why = why_not_forced(LANGUAGE, TABLE, {END}, output, runs)
    assert why is None if says is None else says in (why or "")
