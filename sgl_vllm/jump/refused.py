"""Forced tokens that the sampling parameters of their request would refuse or replace.

Owns how `allowed_token_ids`, `bad_words` and `logit_bias` apply to forced tokens. Does not own
which requests jump at all (`part.py`), nor which tokens are forced.

These parameters do not affect most forced text. Where they do, nothing is forced and the model
decodes token by token, as without jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


class RefusedTokens:
    """Decides whether a request can take forced tokens.

    Args:
        token_bytes: returns the bytes of each token, empty for special ones.
        chooses_tokens: whether forced tokens are the canonical ones of several for the same text.
            If they are the only legal ones, no bias changes them.
    """

    def __init__(self, token_bytes: Callable[[], Sequence[bytes]], *, chooses_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._chooses_tokens = chooses_tokens
        self._allowed: WeakKeyDictionary[Request, frozenset[int]] = WeakKeyDictionary()
        self._biased: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    def any_of(self, request: Request, forced: Sequence[int]) -> bool:
        """Whether the sampling parameters of `request` refuse or replace one of `forced`.

        A bias counts if it is on a token that occurs in the forced text: the model might spell the
        text with it, or without it. Cost: O(1) without such parameters, otherwise O(forced tokens x
        biased tokens or bad words).
        """
        params = request.sampling_params
        assert params is not None
        return (
            (bool(params.allowed_token_ids) and not self._allows(request, params, forced))
            or (bool(params.bad_words) and _completes_bad_word(request, params, forced))
            or (
                self._chooses_tokens
                and bool(params.logit_bias)
                and self._is_biased(request, params, forced)
            )
        )

    def _allows(self, request: Request, params: SamplingParams, forced: Iterable[int]) -> bool:
        allowed = self._allowed.get(request)
        if allowed is None:
            allowed = self._allowed[request] = frozenset(params.allowed_token_ids or ())
        return allowed.issuperset(forced)

    def _is_biased(self, request: Request, params: SamplingParams, forced: Iterable[int]) -> bool:
        token_bytes = self._token_bytes()
        pieces = self._biased.get(request)
        if pieces is None:
            pieces = self._biased[request] = _texts_of(params.logit_bias or (), token_bytes)
        text = b"".join(token_bytes[token] for token in forced)
        return any(piece in text for piece in pieces)


def _texts_of(tokens: Collection[int], token_bytes: Sequence[bytes]) -> list[bytes]:
    texts = (token_bytes[token] for token in tokens if 0 <= token < len(token_bytes))
    return [text for text in texts if text]


def _completes_bad_word(request: Request, params: SamplingParams, forced: Sequence[int]) -> bool:
    """Whether a bad word, as vLLM spells it, ends in one of the forced tokens."""
    bad_words = params.bad_words_token_ids or ()
    longest = max(map(len, bad_words), default=0)
    before = request.output_token_ids[-(longest - 1) :] if longest > 1 else ()
    tokens = [*before, *forced]
    return any(
        tokens[end - len(word) : end] == word
        for end in range(len(before) + 1, len(tokens) + 1)
        for word in bad_words
        if len(word) <= end
    )
