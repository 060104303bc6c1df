"""The beginnings of a request as numbers: equal for two requests exactly where both begin alike.

Owns which beginnings have a number (the *ladder*), and how it is computed. Pure numpy.

A text is cut into grains, of as many tokens as the engines' blocks have. A beginning of up to 128
grains has a number at every length, a longer one at every second, fourth, ... grain, so that 64 are
between a length and its double:

    grains     1, 2, 3 ... 128, 130, 132 ... 256, 260, 264 ... 512, 520 ...

So a prompt of n grains has some 64 log2(n / 32) of them, 512 for 128k tokens in grains of 16, and
how much of a long beginning two requests share is known to 1/64 of it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.integer] | bytes
"""What a request asks: token ids, shape (n,), or its text in UTF-8 where there is no tokenizer."""

BYTES_PER_TOKEN = 4
"""Of text, as a rule of thumb, and exactly of a packed token: a grain of either is as long."""

LADDER_STEPS = 64
"""So many numbered lengths between a long length and its double."""

_KEY_BITS = 60  # larger integers take Python 48 bytes instead of 32
_MULTIPLIER = 0x9E3779B97F4A7C15


class Namespace(NamedTuple):
    """Who shares cached tokens with whom: the LoRA adapter's name and the tenant's `cache_salt`."""

    lora: str | None = None
    salt: str | None = None


NO_NAMESPACE = Namespace()


class Prefixes(NamedTuple):
    """The numbered beginnings of one request, shortest first.

    Attributes:
        keys: a number each, in [0, 2**60), shape (n,).
        lengths: their lengths in grains, shape (n,): the ladder's first n; not to be written to.
        num_tokens: of the request, all of them; of text, estimated.
    """

    keys: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_tokens: int


@lru_cache(maxsize=1024)
def seed_of(namespace: Namespace, kind: str) -> int:
    """What all beginnings of a namespace start from: 64 bits. `kind` tells tokens from text."""
    digest = hashlib.blake2b(repr((*namespace, kind)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PrefixHasher:
    """Numbers the beginnings of requests. Stateless, but for tables that grow with the longest.

    A grain's digest is the sum of its 8-byte words, each times its own odd number, and mixed; a
    beginning's *state* is the sum of its grains' digests times powers of another, modulo 2**64. So
    a state can be continued from any grain on, and all of a request's are one `cumsum`. Two texts
    that differ get one number with a chance of 2**-32 at most, unless they are made to collide; all
    that costs is a worse choice of worker.

    Cost: 25 us for a prompt of 7k tokens, 80 us for one of 118k.
    """

    def __init__(self, grain_tokens: int = 16) -> None:
        """Raises ValueError for grains that are not whole 8-byte words."""
        if grain_tokens < 2 or grain_tokens % 2:
            raise ValueError(f"a grain has an even number of tokens, not {grain_tokens}")
        self.grain_tokens = grain_tokens
        self._grain_words = grain_tokens * BYTES_PER_TOKEN // 8
        self._weights = _powers(0xD6E8FEB86659FD93, self._grain_words)
        self._powers = _powers(_MULTIPLIER, 0)
        self._ladder = np.empty(0, dtype=np.int64)
        self._grow(1024)

    def prefixes(self, units: Units, namespace: Namespace = NO_NAMESPACE) -> Prefixes:
        """Of a whole request."""
        if isinstance(units, bytes):
            num_tokens, kind = -(-len(units) // BYTES_PER_TOKEN), "text"
        else:
            num_tokens, kind = len(units), "tokens"
        words = self._words(units)
        states = self.states(words, seed_of(namespace, kind), 0)
        lengths = self._ladder[: np.searchsorted(self._ladder, len(states), side="right")]
        return Prefixes(self._keys(states[lengths - 1], lengths), lengths, num_tokens)

    def ladder_length(self, num_steps: int) -> int:
        """In grains, of the longest of the first `num_steps` beginnings."""
        return int(self._ladder[num_steps - 1]) if num_steps else 0

    def grains(self, tokens: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Tokens as `states` takes them; what does not fill a grain is left out."""
        return self._words(tokens)

    def states(self, words: NDArray[np.uint64], state: int, num_before: int) -> NDArray[np.uint64]:
        """The state after each grain of `words`, shape (grains, words per grain), which continue a
        text of `num_before` grains with this state."""
        self._grow(num_before + len(words))
        digests = words @ self._weights
        digests ^= digests >> np.uint64(29)
        digests *= np.uint64(_MULTIPLIER)
        digests ^= digests >> np.uint64(32)
        digests *= self._powers[num_before : num_before + len(words)]
        np.cumsum(digests, out=digests)
        digests += np.uint64(state)
        return digests

    def keys_at(
        self, states: NDArray[np.uint64], num_before: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of `states`, the first of which comes after `num_before` grains and one more, end a
        beginning of the ladder, by their indices, and its keys."""
        ends = (num_before, num_before + len(states))
        low, high = np.searchsorted(self._ladder, ends, side="right")
        lengths = self._ladder[low:high]
        indices = lengths - num_before - 1
        return indices, self._keys(states[indices], lengths)

    def _words(self, units: Units) -> NDArray[np.uint64]:
        """Whole grains, shape (grains, words per grain)."""
        if isinstance(units, bytes):
            flat = np.frombuffer(units, np.uint8)
        else:
            flat = np.ascontiguousarray(units, dtype=np.int32).view(np.uint8)
        num_grains = len(flat) // (8 * self._grain_words)
        words = flat[: num_grains * 8 * self._grain_words].view(np.uint64)
        return words.reshape(num_grains, self._grain_words)

    @staticmethod
    def _keys(states: NDArray[np.uint64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The finalizer of SplitMix64 over state and length."""
        keys = states + lengths.astype(np.uint64) * np.uint64(_MULTIPLIER)
        keys ^= keys >> np.uint64(30)
        keys *= np.uint64(0xBF58476D1CE4E5B9)
        keys ^= keys >> np.uint64(27)
        keys *= np.uint64(0x94D049BB133111EB)
        keys >>= np.uint64(64 - _KEY_BITS)
        return keys.view(np.int64)

    def _grow(self, num_grains: int) -> None:
        """Tables for texts of so many grains, at least."""
        if num_grains <= len(self._powers):
            return
        size = max(num_grains, 2 * len(self._powers))
        self._powers = _powers(_MULTIPLIER, size)
        num_doublings = max(0, (size - 1) // (2 * LADDER_STEPS)).bit_length()
        gap_logs = [0] * (2 * LADDER_STEPS)
        for log in range(1, num_doublings + 1):
            gap_logs += [log] * LADDER_STEPS
        self._ladder = np.cumsum(1 << np.array(gap_logs, dtype=np.int64))


def _powers(base: int, num: int) -> NDArray[np.uint64]:
    """base**1 ... base**num modulo 2**64."""
    return np.cumprod(np.full(num, base, dtype=np.uint64), dtype=np.uint64)
