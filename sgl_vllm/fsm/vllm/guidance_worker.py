"""The process that compiles with llguidance (`worker.py`), to see that it comes to an end.

The first question is the vocabulary, JSON: the token that ends a text, and the bytes of each token
as Latin-1. Each other question is a grammar, as llguidance serializes it. The answer is empty: what
is wrong with a grammar is reported by the backend that compiles it next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import llguidance

from sgl_vllm.fsm.worker import serve

_tokenizers: list[llguidance.LLTokenizer] = []


class _Vocabulary:
    """Tokens as llguidance asks for them. Nothing is tokenized here."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        return []


def answer(question: bytes) -> tuple[int, bytes]:
    if not _tokenizers:
        end_token, texts = json.loads(question)
        vocabulary = _Vocabulary([text.encode("latin-1") for text in texts], end_token)
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        _tokenizers.append(llguidance.LLTokenizer(wrapper, slices=[]))
        return 0, b""
    matcher = llguidance.LLMatcher(_tokenizers[0], question.decode(), log_level=0)
    if not matcher.get_error():
        matcher.compute_bitmask()
    return 0, b""


if __name__ == "__main__":
    serve(answer)
