"""Trees -> automata: UTF-8, the ends of ranges, and limits. Their texts: test_regex.py."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.nfa import dfa_of
from sgl_vllm.fsm.syntax import CharacterClass, Node, Repetition, Sequence, Text
from tests.effort import examples

ANY = CharacterClass(((0, 0xD7FF), (0xE000, 0x10FFFF)))


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=5))
def test_only_utf8_is_a_text(data):
    try:
        data.decode()
        is_text = True
    except UnicodeDecodeError:
        is_text = False
    assert dfa_of(Repetition(ANY, 0, None)).accepts(data) == is_text


FIRSTS = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0xFFFF, 0x10000, 0x3FFFF]
LASTS = [0x7F, 0x82, 0x801, 0x1001, 0xFFFF, 0x10001, 0x40000, 0x10FFFF]


@pytest.mark.parametrize(
    "first, last", [pair for pair in itertools.product(FIRSTS, LASTS) if pair[0] <= pair[1]]
)
def test_the_ends_of_a_range_are_in_it_and_their_neighbors_are_not(first, last):
    dfa = dfa_of(CharacterClass(((first, last),)))
    for code in {*range(max(0, first - 2), first + 2), *range(last - 2, min(last + 3, 0x110000))}:
        if not 0xD800 <= code <= 0xDFFF:
            assert dfa.accepts(chr(code).encode()) == (first <= code <= last), hex(code)


LETTER = CharacterClass(((0x61, 0x62),))


@pytest.mark.parametrize(
    "node",
    [
        Sequence((Repetition(LETTER, 0, None), Text(b"a"), Repetition(LETTER, 40, 40))),
        Repetition(Repetition(LETTER, 0, 5_000), 5_000, 5_000),
        Sequence((Repetition(Repetition(Text(b"a"), 0, 1), 6_000, 6_000), Text(b"a" * 6_000))),
    ],
    ids=["states", "parts", "steps"],
)
def test_what_explodes_is_given_up_at_once(node):
    started = time.thread_time()
    with pytest.raises(TooComplexError):
        dfa_of(node)
    assert time.thread_time() - started < 2


def test_what_is_nested_too_deeply_is_given_up():
    node: Node = Text(b"a")
    for _ in range(10_000):
        node = Sequence((node, node))
    with pytest.raises(TooComplexError, match="nested too deeply"):
        dfa_of(node)
