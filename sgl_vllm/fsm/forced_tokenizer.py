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
  `31` is a token). Trailing tokens that could change, given the bytes that may follow, are left to
  the model.

Runs are remembered by the little of their context that decides how they are spelled. For `"}` that
is nothing after `{"name": "Ann`, nor after `{"name": "Bob`: a letter and a quotation mark are never
in one token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from string import ascii_letters, digits, punctuation

MAX_CONTEXT_TOKENS = 16
"""How much left context is tokenized again with a run. Pre-tokenizers split text into words, so a
few tokens decide what merges across the seam."""

MAX_REMEMBERED_BYTES = 16 << 20
"""About what the remembered runs may take; then all are forgotten."""

_RUN_BYTES, _TOKEN_BYTES = 1_000, 36
_MAX_NEXT = 8
"""A run remembers its settled tokens for so many sets of bytes that may come next."""

_MAX_CACHED_SUFFIXES = 65_536
_MAX_BYTES_TRIED = 20_000
"""Where more would have to be tokenized, some 20 ms, the end of the run is left to the model."""

_WHITE_SPACE_AT_END = re.compile(rb"\s\s+\Z")

_WORD_BREAKS = [
    (left + right).encode()
    for left in ascii_letters + digits + punctuation
    for right in " " + punctuation
    if right == " " or (left.isalnum() and right != "'")
]
"""Pairs of characters that pre-tokenizers have in two words. Some take `'s` to the word before."""


class ForcedRun:
    """Forced text, spelled in the tokens of one vocabulary.

    Attributes:
        tokens: their bytes are exactly those of the text; empty if no tokens spell it.
    """

    __slots__ = ("_before", "_num_settled", "_text", "_tokenizer", "tokens")

    def __init__(self, tokenizer: ForcedTokenizer, before: str, text: str) -> None:
        self._tokenizer = tokenizer
        self._before = before
        self._text = text
        self.tokens = tokenizer.spelled(before, text)
        self._num_settled = {0: len(self.tokens)}

    def settled(self, next_bytes: int) -> tuple[int, ...]:
        """The leading tokens that stay as they are, whatever follows. The rest is left to the
        model.

        Args:
            next_bytes: the bytes that may follow the run, as bits (bit b for byte b); 0 if
                nothing may.
        """
        num_settled = self._num_settled.get(next_bytes)
        if num_settled is None:
            if len(self._num_settled) >= _MAX_NEXT:
                self._num_settled.clear()
            num_settled = self._tokenizer.num_settled(
                self.tokens, self._before, self._text, next_bytes
            )
            self._num_settled[next_bytes] = num_settled
        return self.tokens[:num_settled]


class ForcedTokenizer:
    """Turns forced text into tokens for one vocabulary.

    Built once per vocabulary, by sorting it. A run that is not known costs one `encode` of it, one
    for each place in it where a longer token could begin, and a dictionary look-up per byte that
    the longest token could span.

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
        self._breaks = self._certain_breaks()
        self._runs: dict[tuple[str, str], ForcedRun] = {}
        self._num_bytes = 0

    def run(self, context: Sequence[int], text: str) -> ForcedRun:
        """The forced `text`, which is not empty, after the tokens `context`."""
        key = self._text_before(context, text), text
        run = self._runs.get(key)
        if run is None:
            run = ForcedRun(self, *key)
            if self._num_bytes > MAX_REMEMBERED_BYTES:
                self._runs.clear()
                self._num_bytes = 0
            self._num_bytes += _RUN_BYTES + len(text) + _TOKEN_BYTES * len(run.tokens)
            self._runs[key] = run
        return run

    def spelled(self, before: str, text: str) -> tuple[int, ...]:
        """The tokens of `text` after the text `before`; those of `text` alone if the tokenizer
        merges the two. Empty if their bytes are not exactly those of `text`."""
        data = text.encode()
        for context in (before, "") if before else ("",):
            tokens = self._encode(context + text)
            seam, num_bytes = len(tokens), 0
            while seam and num_bytes < len(data):
                seam -= 1
                num_bytes += len(self._token_bytes[tokens[seam]])
            if self._bytes_of(tokens[seam:]) == data:
                return tuple(tokens[seam:])
        return ()

    def num_settled(self, tokens: tuple[int, ...], before: str, text: str, next_bytes: int) -> int:
        """How many of a run's leading tokens stay as they are, whatever follows.

        A token that goes past the end of the run may begin anywhere in it. The tokens before that
        place are those of the text before it, as byte pairs are merged on either side of a boundary
        as if there were nothing on the other.

            text          01100|1       if `01` goes past the end, `0110` is before it
            tokens        01|1|00       so only the first token is certain
            if 1 follows  01|10|01
        """
        data = text.encode()
        ends = self._open_ends(data, next_bytes)
        if white_space := _WHITE_SPACE_AT_END.search(data):  # what follows decides how it is split
            ends.add(white_space.start())
        if not ends:
            return len(tokens)
        begin, num_certain = self._last_break(tokens, data, min(ends))
        tokens = tokens[num_certain:]
        if len(ends) * (len(data) - begin) > _MAX_BYTES_TRIED:
            return num_certain
        for end in ends:
            text = data[begin:end].decode()
            others = self.spelled("" if begin else before, text) if text else ()
            equal = zip(tokens, others, strict=False)
            count = min(len(tokens), len(others))
            tokens = tokens[: next((i for i, (a, b) in enumerate(equal) if a != b), count)]
        return num_certain + len(tokens)

    def _open_ends(self, data: bytes, next_bytes: int) -> set[int]:
        """Where in a text a character begins in which a token may begin that goes past its end."""
        pending, ends, cut = [(len(data), next_bytes)], set[int](), set[int]()
        while pending:
            end, following = pending.pop()
            for start in range(max(0, end - self._max_token_bytes + 1), end):
                if not self._followers_of(data[start:end]) & following:
                    continue
                character = start
                while data[character] & 0xC0 == 0x80:
                    character -= 1
                ends.add(character)
                if character < start and character not in cut:  # text can only end before it
                    cut.add(character)
                    pending.append((character, 1 << data[character]))
        return ends

    def _last_break(self, tokens: Sequence[int], data: bytes, most: int) -> tuple[int, int]:
        """The last certain break in a text within its first `most` bytes, or its beginning; and how
        many of the text's tokens are before it."""
        while most and data[most - 1 : most + 1] not in self._breaks:
            most -= 1
        count = position = 0
        while position < most:
            position += len(self._token_bytes[tokens[count]])
            count += 1
        return most, count

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes[token] for token in tokens])

    def _text_before(self, context: Sequence[int], text: str) -> str:
        """The end of the text before a run that decides how the run is spelled: that of the last
        few tokens, after the last special token and the last certain break."""
        first = text[:1].encode()
        data = first
        for token in reversed(context[-MAX_CONTEXT_TOKENS:]):
            piece = self._token_bytes[token] if token < len(self._token_bytes) else b""
            if not piece:
                break
            data = piece + data
            for position in range(len(piece), 0, -1):
                if data[position - 1 : position + 1] in self._breaks:
                    return _readable(data[position : -len(first)])
        return _readable(data[: -len(first)])

    def _certain_breaks(self) -> set[bytes]:
        """The pairs of characters that are never in one token. None if the tokenizer adds to what
        it is given, for then a part of a text has other tokens."""
        if self._bytes_of(self._encode("a")) != b"a":
            return set()
        data = b"\n".join(self._sorted_tokens)
        in_tokens = set(pairwise(data))
        return {pair for pair in _WORD_BREAKS if (*pair,) not in in_tokens}

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


def _readable(data: bytes) -> str:
    """The text after the last bytes that are none."""
    return data.decode(errors="replace").rpartition("\N{REPLACEMENT CHARACTER}")[2]
