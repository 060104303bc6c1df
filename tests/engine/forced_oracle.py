"""Which tokens a grammar forces, by brute force: the oracle that jump-forward is compared with.

Reads nothing but xgrammar's masks and the tokenizer, and shares no code with the plugin, so that a
mistake in the plugin's forced tokens cannot be on both sides of a comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

NUM_CONTEXT_TOKENS = 16
"""How many tokens before forced text can decide how it is spelled."""


class ForcedOracle:
    """Canonical forced tokens for one vocabulary, as docs/structured-output.md defines them.

    1. Text is forced as long as all tokens that the grammar allows begin with the same byte.
    2. It is spelled as the tokenizer spells it after the text before it; if the tokenizer would
       merge the two, by itself. If a request must not use one of these tokens, nothing is forced.
    3. Its last tokens are the model's choice if they would be others were a longer token of the
       vocabulary to begin somewhere in the text and go on as the grammar allows.
    4. The end token is forced where it is the only legal token.

    A call costs one mask for each forced byte, and accepts the whole output again.

    Attributes:
        text_of: the bytes of each token, empty for special ones.

    Args:
        encode: text to token ids, without special tokens.
        tokenizer_info: xgrammar's description of the vocabulary.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], tokenizer_info: xgrammar.TokenizerInfo
    ) -> None:
        self._encode = encode
        self._mask = xgrammar.allocate_token_bitmask(1, tokenizer_info.vocab_size)
        self.text_of = list(tokenizer_info.decoded_vocab)
        for token in (*tokenizer_info.special_token_ids, *tokenizer_info.stop_token_ids):
            self.text_of[token] = b""
        self._bytes_after: dict[bytes, set[int]] = defaultdict(set)
        """For every proper prefix of a token's text, the bytes that follow it in some token."""
        for text in self.text_of:
            for length in range(1, len(text)):
                self._bytes_after[text[:length]].add(text[length])

    def forced(
        self,
        grammar: xgrammar.CompiledGrammar,
        stop_token_ids: Collection[int],
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> list[int]:
        """The tokens forced after `output`, which the grammar has accepted.

        `stop_token_ids` end the output, and are not legal as a part of its text.
        """
        of_text = _after(output, xgrammar.GrammarMatcher(grammar))
        of_request = _after(
            output, xgrammar.GrammarMatcher(grammar, override_stop_tokens=sorted(stop_token_ids))
        )
        text = self._forced_text(of_text.fork())
        context = [*prompt, *output]
        tokens = self._spelled(context, text)
        if not all(of_request.accept_token(token) for token in tokens) or (text and not tokens):
            return []
        assert of_text.accept_string(text)
        may_follow = {piece[0] for piece in self._legal_texts(of_text) if piece}
        if may_follow:
            return self._without_open_end(context, text, may_follow)
        ends = self._legal(of_request)
        return [*tokens, *map(int, ends)] if len(ends) == 1 else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """For messages."""
        return self._joined(tokens).decode(errors="replace")

    def _legal(self, matcher: xgrammar.GrammarMatcher) -> NDArray[np.intp]:
        """The tokens that the grammar allows next."""
        if matcher.is_terminated():
            return np.zeros(0, np.intp)
        self._mask.fill_(-1)
        matcher.fill_next_token_bitmask(self._mask)
        bits = np.unpackbits(self._mask.view(torch.uint8).numpy(), bitorder="little")
        return np.flatnonzero(bits[: len(self.text_of)])

    def _legal_texts(self, matcher: xgrammar.GrammarMatcher) -> list[bytes]:
        return [self.text_of[token] for token in self._legal(matcher)]

    def _forced_text(self, matcher: xgrammar.GrammarMatcher) -> str:
        """As far as it is whole characters."""
        run = b""
        while step := _common_beginning(self._legal_texts(matcher)):
            assert matcher.accept_string(step)
            run += step
        text = run.decode(errors="ignore")  # leaves out a last character that is cut
        assert run.startswith(text.encode())
        return text

    def _spelled(self, context: Sequence[int], text: str) -> list[int]:
        before = self._decoded(context)
        for tokens in (self._encode(before + text), self._encode(text)):
            for start in range(len(tokens) + 1):
                if self._joined(tokens[start:]) == text.encode():
                    return tokens[start:]
        return []

    def _decoded(self, context: Sequence[int]) -> str:
        """The text of the last tokens, after the last special one and the last that is no UTF-8."""
        tail: list[bytes] = []
        for token in reversed(context[-NUM_CONTEXT_TOKENS:]):
            if not self.text_of[token]:
                break
            tail.insert(0, self.text_of[token])
        return b"".join(tail).decode(errors="replace").split("\N{REPLACEMENT CHARACTER}")[-1]

    def _without_open_end(
        self, context: Sequence[int], text: str, may_follow: set[int]
    ) -> list[int]:
        """The tokens with which `text` is spelled however long the last token before a longer one
        that goes past its end is."""
        run = text.encode()
        spellings = [self._spelled(context, text)]
        if text[-2:].isspace() and len(text) > 1:  # what follows decides how it is split
            spellings.append(self._spelled(context, text.rstrip()))
        for start in range(len(run)):
            if self._bytes_after.get(run[start:], set()) & may_follow:
                whole = run[:start].decode(errors="ignore")
                cut = run[len(whole.encode()) : start]
                spellings.append(
                    self._without_open_end(context, whole, {cut[0]})
                    if cut
                    else self._spelled(context, whole)
                )
        by_position = zip(*spellings, strict=False)
        return [first for first, *_ in takewhile(lambda column: len({*column}) == 1, by_position)]

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.text_of[token] for token in tokens)


def _common_beginning(texts: list[bytes]) -> bytes:
    """Empty if one of them is, or if there is none."""
    if not texts:
        return b""
    first, last = min(texts), max(texts)
    length = 0
    while length < len(first) and first[length] == last[length]:
        length += 1
    return first[:length]


def _after(output: Sequence[int], matcher: xgrammar.GrammarMatcher) -> xgrammar.GrammarMatcher:
    assert all(matcher.accept_token(token) for token in output)
    return matcher
