"""Forced text -> forced tokens: the canonical tokens of the text that can be appended now.

Owns the tokenization of text that a grammar forces. Does not own the grammar, nor what a jump does
to a request (`jump/jump.py`). Pure: no vLLM, no torch.

A grammar forces *characters*; the model reads *tokens*. Both ends of a run of forced text need
care, because mistakes there change answers:

    context      forced              not decided yet
    ... {"name  |": "Ann", "age": 3|?
               ^ seam             ^ end

- Seam: the run is tokenized together with the text before it, and its tokens are those from the
  end of the context on. If the tokenizer would merge across the seam, the context's last token
  cannot be taken back, so the run is tokenized on its own.
- End: a token that reaches past the end of the run might be what the model wants (`3` is forced,
  `31` is a token). Trailing tokens that a longer token could absorb, given the bytes that may
  follow, are left to the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

MAX_CONTEXT_TOKENS = 16
"""How much left context is tokenized again with a run. Pre-tokenizers split text into words, so a
few tokens decide what merges across the seam."""

_MAX_CACHED_SUFFIXES = 65_536
_MAX_CACHED_RUNS = 512


class ForcedTokenizer:
    """Turns forced text into tokens for one vocabulary.

    Built once per vocabulary, by sorting it. A run then costs one `encode` of the run and its
    context, and a dictionary look-up per byte that the longest token could span.

    Args:
        encode: text -> token ids, without special tokens.
        token_bytes: what each token id decodes to; empty for tokens that are not text (special
            ones).
    """

    def __init__(self, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self._sorted_tokens = sorted(set(token_bytes) - {b""})
        self._max_token_bytes = max(map(len, self._sorted_tokens), default=0)
        self._followers: dict[bytes, int] = {}
        self._encode_alone = lru_cache(_MAX_CACHED_RUNS)(encode)

    def tokenize(self, context: Sequence[int], forced: str) -> list[int]:
        """The tokens of `forced` after the tokens `context`.

        Returns: tokens whose bytes are exactly those of `forced`; empty if there are none.
        """
        forced_bytes = forced.encode()
        context_text = self._text_before(context)
        seam = len(context_text.encode())
        if seam:
            tokens = self._encode(context_text + forced)
            position = 0
            for index, token in enumerate(tokens):
                if position == seam:
                    if self._bytes_of(tokens[index:]) == forced_bytes:
                        return tokens[index:]
                    break
                position += len(self._token_bytes[token])
        tokens = self._encode_alone(forced)
        return list(tokens) if self._bytes_of(tokens) == forced_bytes else []

    def num_settled(self, tokens: Sequence[int], next_bytes: int) -> int:
        """How many of a run's leading `tokens` are certain: no longer token could absorb them.

        Args:
            tokens: the tokens of a run, as from `tokenize`.
            next_bytes: the bytes that may follow the run, as bits (bit b for byte b); 0 if
                nothing may.

        Returns: a count in [0, len(tokens)]. The rest is left to the model.
        """
        if not next_bytes:
            return len(tokens)
        run = self._bytes_of(tokens)
        earliest = len(run)
        for start in range(max(0, len(run) - self._max_token_bytes + 1), len(run)):
            if self._followers_of(run[start:]) & next_bytes:
                earliest = start
                break
        position = 0
        for count, token in enumerate(tokens):
            position += len(self._token_bytes[token])
            if position > earliest:
                return count
        return len(tokens)

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes[token] for token in tokens])

    def _text_before(self, context: Sequence[int]) -> str:
        """The text of the last few context tokens, after the last special token."""
        tail: list[bytes] = []
        for token in reversed(context[-MAX_CONTEXT_TOKENS:]):
            piece = self._token_bytes[token] if token < len(self._token_bytes) else b""
            if not piece:
                break
            tail.append(piece)
        data = b"".join(reversed(tail))
        begin = 0
        while begin < len(data) and data[begin] & 0xC0 == 0x80:  # inside a UTF-8 character
            begin += 1
        try:
            return data[begin:].decode()
        except UnicodeDecodeError:
            return ""

    def _followers_of(self, prefix: bytes) -> int:
        """The bytes that follow `prefix` in longer tokens, as bits."""
        known = self._followers.get(prefix)
        if known is None:
            tokens, known = self._sorted_tokens, 0
            length = len(prefix)
            for index in range(bisect_left(tokens, prefix), len(tokens)):
                token = tokens[index]
                if not token.startswith(prefix):
                    break
                if len(token) > length:
                    known |= 1 << token[length]
            if len(self._followers) >= _MAX_CACHED_SUFFIXES:
                self._followers.clear()
            self._followers[prefix] = known
        return known
