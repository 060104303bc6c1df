"""The mask of a state, compared with stepping through every token of a vocabulary."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm import masks as masks_module
from sgl_vllm.fsm import terminal_walks
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.masks import Bitmasks, fill
from sgl_vllm.fsm.schema import compile_schema
from sgl_vllm.fsm.vocabulary import MAX_SIZE, Vocabulary
from tests.unit.fsm.grammars import GRAMMARS
from tests.unit.fsm.texts import after, random_walk


def legal_by_steps(vocabulary: Vocabulary, state) -> set[int]:
    pieces = enumerate(vocabulary.token_bytes)
    return {token for token, piece in pieces if piece and after(state, piece) is not None}


def legal_by_mask(masks: Bitmasks, vocabulary: Vocabulary, state) -> set[int]:
    words = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    fill(masks.of(state), words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def check(masks: Bitmasks, vocabulary: Vocabulary, states) -> None:
    for state in states:
        assert legal_by_mask(masks, vocabulary, state) == legal_by_steps(vocabulary, state)


PIECES = [bytes([b]) for b in range(256)]
PIECES += ["é".encode(), "é".encode()[:1], "é".encode()[1:], "😀".encode(), "😀".encode()[:2]]
PIECES += ["😀".encode()[2:] + b'"', b"a\xc3", b'\xa9"', b"\xa9\xa9", b"\xed\xa0", b"\xf0\x9f"]
PIECES += [b"abc" * 20, b"abc" * 300, b" " * 7, b"\n  ", b'\n "', b'a\\"b"', b'\\u0061"', b'", "']
PIECES += (
    b'", ": "} "] "}] {"  {"a": "a" "ab ab abc }} ]} [[ ]] true tr null nu 12 123 3. .5'.split()
)
PIECES += (
    b'0e -1 1, 1] 12} \\ \\" \\u \\u00 \\u00e9 \\n x" xy", xyz" name":" "name children'.split()
)
PIECES += b'": [{" i1":5 2024- -02- T10: yes terday'.split()

vocabularies = st.lists(
    st.sampled_from(PIECES) | st.binary(min_size=1, max_size=3) | st.just(b""),
    min_size=1,
    max_size=120,
).map(lambda chosen: chosen + [bytes([b]) for b in b'"{}[]:, a1'])


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=2, deadline=None)
@given(vocabularies, st.integers(0, 10**9))
def test_masks_of_random_vocabularies(name, token_bytes, seed):
    vocabulary = Vocabulary(token_bytes, len(token_bytes) + seed % 40)
    states = random_walk(Automaton(GRAMMARS[name]()).start, random.Random(seed), 40, end=0.1)
    check(Bitmasks(vocabulary), vocabulary, states)


@pytest.fixture(scope="module")
def everything() -> Vocabulary:
    """All the pieces that make trouble, some of them twice, and some special tokens."""
    token_bytes = [*PIECES, *PIECES[256:], b"", b""]
    return Vocabulary(token_bytes, len(token_bytes) + 5)


@pytest.mark.parametrize(("dense_from", "max_shared"), [(1, 8), (1, 1), (512, 8)])
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_of_troublesome_pieces(everything, name, dense_from, max_shared, monkeypatch):
    monkeypatch.setattr(terminal_walks, "_DENSE_FROM", dense_from)
    monkeypatch.setattr(masks_module, "_MAX_SHARED", max_shared)
    masks = Bitmasks(everything)
    start = Automaton(GRAMMARS[name]()).start
    for seed in range(3):
        check(masks, everything, random_walk(start, random.Random(seed), 60, end=0.1))


@pytest.fixture
def walked_from(monkeypatch) -> list:
    """The nodes of which walks of the vocabulary begin."""
    begun = []
    walk = terminal_walks.walk

    def noted(trie_set, *args):
        begun.append(trie_set)
        return walk(trie_set, *args)

    monkeypatch.setattr(terminal_walks, "walk", noted)
    return begun


def test_the_states_of_a_searched_pattern_take_one_walk_of_the_vocabulary(walked_from, monkeypatch):
    pieces = [bytes([b]) for b in range(256)]
    pieces += [b"%c%c%c" % (a, b, c) for a in b"abcdefghij1" for b in b"rstu" for c in b"uvwxyz"]
    vocabulary = Vocabulary(pieces, len(pieces))
    monkeypatch.setattr(terminal_walks, "_DENSE_FROM", 100)
    monkeypatch.setattr(terminal_walks, "_MAX_DIFFERENCE", 0.9)
    masks, start = Bitmasks(vocabulary), Automaton(GRAMMARS["pattern anywhere"]()).start
    for text in (b'"', b'"1', b'"12'):
        state = after(start, text)
        assert state is not None
        masks.of(state)
    assert walked_from.count(vocabulary.root) == 1


def test_tokens_of_any_length_are_offered_inside_strings():
    vocabulary = Vocabulary([b"a", b"a" * 1022, b"a" * 40_000, b'a"', b'a"a'], 5)
    state = after(Automaton(compile_schema({"type": "string"})).start, '"')
    assert legal_by_mask(Bitmasks(vocabulary), vocabulary, state) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "most"), [("wide, again and again", 2), ("wide, eight times", 9), ("wide, twice", 2)]
)
def test_a_wide_part_is_walked_once_from_each_node(name, most, walked_from):
    """However many ways lead to a node, and however long tokens are."""
    pieces = [
        b"%s%s" % (b" " * n, letter) for n in range(40) for letter in (b"a", b"b", b"\xc3\xa9")
    ]
    vocabulary = Vocabulary(pieces, len(pieces))
    Bitmasks(vocabulary).of(Automaton(GRAMMARS[name]()).start)
    assert 1 < len(walked_from) <= most
    assert all(len(np.unique(one.nodes)) == len(one.nodes) for one in walked_from)


def test_vocabularies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError):
        Vocabulary([b"a"], MAX_SIZE + 1)
    with pytest.raises(ValueError):
        Vocabulary([b"a", b"b"], 1)
