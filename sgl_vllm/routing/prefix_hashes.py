"""The beginnings of a request as numbers: equal for two requests exactly where both begin alike.

Owns which beginnings have a number (the *ladder*), and how it is computed. Pure: numpy and numba.

A text is cut into grains, of as many tokens as the engines' blocks have. A beginning of up to 128
grains has a number at every length, a longer one at every second, fourth, ... grain, so that 64 are
between a length and its double:

    grains     1, 2, 3 ... 128, 130, 132 ... 256, 260, 264 ... 512, 520 ...

So a prompt of n grains has some 64 log2(n / 32) of them, 512 for 128k tokens in grains of 16, and
how much of a long beginning two requests share is known to 1/64 of it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.jit import compiled

Units = NDArray[np.integer] | bytes
"""What a request asks: token ids, shape (n,), or its text in UTF-8 where there is no tokenizer."""

BYTES_PER_TOKEN = 4
"""Of text, as a rule of thumb, and exactly of a packed token: a grain of either is as long."""

LADDER_STEPS = 64
"""So many numbered lengths between a long length and its double."""

_GAP_LOGS = np.repeat(np.arange(25), [2 * LADDER_STEPS] + 24 * [LADDER_STEPS])
_LADDER = np.cumsum(1 << _GAP_LOGS)  # all numbered lengths, in grains, to 2**31
_LENGTHS: list[int] = _LADDER.tolist()

_KEY_BITS = 60  # larger integers take Python 48 bytes instead of 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Namespace(NamedTuple):
    """Who shares cached tokens with whom: the LoRA adapter's name and the tenant's `cache_salt`."""

    lora: str | None = None
    salt: str | None = None


NO_NAMESPACE = Namespace()


class Prefixes(NamedTuple):
    """The numbered beginnings of one request, shortest first; `ladder_length` says how long.

    Attributes:
        keys: a number each, in [0, 2**60), shape (n,).
        num_tokens: of the request, all of them; of text, estimated.
    """

    keys: NDArray[np.int64]
    num_tokens: int


@lru_cache(maxsize=1024)
def seed_of(namespace: Namespace, kind: str) -> int:
    """What all beginnings of a namespace start from: 64 bits. `kind` tells tokens from text."""
    digest = hashlib.blake2b(repr((*namespace, kind)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def ladder_length(num_steps: int) -> int:
    """In grains, of the longest of the first `num_steps` numbered beginnings."""
    return _LENGTHS[num_steps - 1] if num_steps else 0


class PrefixHasher:
    """Numbers the beginnings of requests. Stateless.

    A grain's digest is NH of UMAC (Black et al., CRYPTO 1999) over its 4-byte words; a beginning's
    *state* is its last grain's digest mixed with the state before. So one pass finds the states of
    a request, and a text can be continued from any grain on. Two texts that differ get one number
    with a chance of some 2**-32, unless they are made to collide; all that costs is a worse choice
    of worker.

    Cost: 7 us for a prompt of 7k tokens; 18 us for one of 99k, 50 us if it is in no core's cache.
    """

    def __init__(self, grain_tokens: int = 16) -> None:
        """Compiles the loops, or loads them, which can take a second. Raises ValueError for grains
        of an odd number of tokens."""
        if grain_tokens < 2 or grain_tokens % 2:
            raise ValueError(f"a grain has an even number of tokens, not {grain_tokens}")
        self.grain_tokens = grain_tokens
        self._constants = np.random.default_rng(0).integers(
            0, 1 << 32, grain_tokens, dtype=np.uint32
        )
        for nothing in (b"", np.empty(0, dtype=np.int32)):
            self.prefixes(nothing)

    def prefixes(self, units: Units, namespace: Namespace = NO_NAMESPACE) -> Prefixes:
        """Of a whole request."""
        if isinstance(units, bytes):
            num_tokens, kind = -(-len(units) // BYTES_PER_TOKEN), "text"
        else:
            num_tokens, kind = len(units), "tokens"
        states = self.states(self.grains(units), seed_of(namespace, kind))
        _, keys = self.ladder_keys(states, 0)
        return Prefixes(keys, num_tokens)

    def grains(self, units: Units) -> NDArray[np.uint32]:
        """Shape (grains, words per grain); what does not fill a grain is left out."""
        if isinstance(units, bytes):
            words = np.frombuffer(units, np.uint32, len(units) // BYTES_PER_TOKEN)
        else:
            words = np.ascontiguousarray(units, dtype=np.int32).view(np.uint32)
        num_grains = len(words) // self.grain_tokens
        return words[: num_grains * self.grain_tokens].reshape(num_grains, self.grain_tokens)

    def states(self, grains: NDArray[np.uint32], state: int) -> NDArray[np.uint64]:
        """The state after each of `grains`, which continue a text with this state."""
        return _states(grains, self._constants, np.uint64(state))

    def ladder_keys(
        self, states: NDArray[np.uint64], num_before: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The lengths (grains) and keys of the numbered beginnings among those with these `states`,
        the first of which has `num_before` grains and one more."""
        begin, end = (bisect_right(_LENGTHS, n) for n in (num_before, num_before + len(states)))
        lengths = _LADDER[begin:end]
        return lengths, _keys(states, lengths, num_before)


@compiled
def _states(
    grains: NDArray[np.uint32], constants: NDArray[np.uint32], state: np.uint64
) -> NDArray[np.uint64]:
    """See `PrefixHasher`. A word of a grain's first half is multiplied with its partner of the
    second, so that the compiler can take several at once."""
    states = np.empty(len(grains), np.uint64)
    half = grains.shape[1] // 2
    for i in range(len(grains)):
        for j in range(half):
            one = np.uint32(grains[i, j] + constants[j])
            other = np.uint32(grains[i, half + j] + constants[half + j])
            state += np.uint64(one) * np.uint64(other)
        state *= _MULTIPLIER
        state ^= state >> np.uint64(32)
        states[i] = state
    return states


@compiled
def _keys(
    states: NDArray[np.uint64], lengths: NDArray[np.int64], num_before: int
) -> NDArray[np.int64]:
    """The finalizer of SplitMix64 over state and length."""
    keys = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        key = states[length - num_before - 1] + np.uint64(length) * _MULTIPLIER
        key ^= key >> np.uint64(30)
        key *= np.uint64(0xBF58476D1CE4E5B9)
        key ^= key >> np.uint64(27)
        key *= np.uint64(0x94D049BB133111EB)
        keys[i] = key >> np.uint64(64 - _KEY_BITS)
    return keys
