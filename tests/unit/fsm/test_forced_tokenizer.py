"""Canonical tokenization of forced text. tests/engine/test_forced_tokens.py says how much of it is
forced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from xgrammar import TokenizerInfo, VocabType

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.fsm.forced_tokenizer import ForcedTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


@pytest.fixture(scope="module")
def forced(tokenizer: Tokenizer) -> ForcedTokenizer:
    pieces = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    token_bytes = list(TokenizerInfo(pieces, VocabType.BYTE_LEVEL).decoded_vocab)
    return ForcedTokenizer(lambda text: tokenizer.encode(text).ids, token_bytes)


JSON_TEXT = st.text(alphabet='{}":, nameAgBobcfé0123\n', max_size=30)


@given(context=JSON_TEXT, run=JSON_TEXT.filter(bool))
def test_the_tokens_spell_the_run_exactly(tokenizer, forced, context, run):
    tokens = forced.tokenize(tokenizer.encode(context).ids, run)
    assert tokenizer.decode(tokens) == run


@given(run=JSON_TEXT.filter(bool), more=JSON_TEXT.filter(bool))
def test_a_settled_token_is_canonical_whatever_follows(tokenizer, forced, run, more):
    """The promise behind the jump: what was appended is how the whole text would be tokenized."""
    tokens = forced.tokenize([], run)
    next_bytes = 1 << more.encode()[0]
    settled = tokens[: forced.num_settled(tokens, next_bytes)]
    assert tokenizer.encode(run + more).ids[: len(settled)] == settled
