"""Canonical tokenization of forced text, on a byte-level BPE trained here."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sgl_vllm.fsm.forced_tokenizer import ForcedTokenizer

ANY_BYTE = (1 << 256) - 1


def bits(text: str) -> int:
    return sum(1 << byte for byte in set(text.encode()))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        json.dumps({"name": n, "age": a, "café": True}) for n in ("Ann", "Bob") for a in (7, 31)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 50, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def forced(tokenizer) -> ForcedTokenizer:
    byte_of = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shift = 0
    for byte in range(256):
        if byte in printable:
            byte_of[chr(byte)] = byte
        else:
            byte_of[chr(256 + shift)] = byte
            shift += 1
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    token_bytes = [
        b"" if piece.startswith("<|") else bytes(byte_of[c] for c in piece) for piece in pieces
    ]
    return ForcedTokenizer(lambda text: tokenizer.encode(text).ids, token_bytes)


def test_a_run_is_tokenized_as_part_of_the_text_it_continues(tokenizer, forced):
    whole = tokenizer.encode('{"name": "Ann", "age": 31}').ids
    for cut in range(1, len(whole)):
        rest = tokenizer.decode(whole[cut:])
        assert forced.tokenize(whole[:cut], rest) == whole[cut:]


def test_special_tokens_are_no_context(tokenizer, forced):
    end = tokenizer.token_to_id("<|end|>")
    assert forced.tokenize([end], '{"name') == tokenizer.encode('{"name').ids


def test_what_a_longer_token_could_absorb_is_held_back(tokenizer, forced):
    tokens = forced.tokenize([], '{"name": "')
    settled = forced.num_settled(tokens, ANY_BYTE)
    assert settled < len(tokens)
    assert tokenizer.decode(tokens[settled:]).strip() == '"'


def test_a_token_that_no_legal_byte_can_lengthen_is_settled(forced):
    tokens = forced.tokenize([], '{"name": "')
    assert forced.num_settled(tokens, bits("\x00")) == len(tokens)


def test_at_the_end_of_the_grammar_everything_is_settled(forced):
    tokens = forced.tokenize([], '"}')
    assert forced.num_settled(tokens, 0) == len(tokens)


JSON_TEXT = st.text(alphabet='{}":, nameAgBobcfé0123\n', max_size=30)


@given(context=JSON_TEXT, run=JSON_TEXT.filter(bool))
def test_the_tokens_spell_the_run_exactly(tokenizer, forced, context, run):
    tokens = forced.tokenize(tokenizer.encode(context).ids, run)
    assert tokenizer.decode(tokens) == run


@given(run=JSON_TEXT.filter(bool), more=JSON_TEXT.filter(bool))
def test_a_settled_token_is_canonical_whatever_follows(tokenizer, forced, run, more):
    """The promise behind the jump: what was appended is how the whole text would be tokenized."""
    tokens = forced.tokenize([], run)
    settled = tokens[: forced.num_settled(tokens, bits(more[0]))]
    assert tokenizer.encode(run + more).ids[: len(settled)] == settled
