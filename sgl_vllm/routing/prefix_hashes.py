"""Prefix hashes: equal for two prompts as far as their prefixes are equal.

Owns which prefixes of a prompt are hashed, and the hash function. Pure: numpy and numba.

A prompt is cut into blocks of as many tokens as the engines' KV blocks have. A prefix of up to 128
blocks is hashed at every block. A longer one is hashed at every second, fourth, ... block, so that
64 hashed lengths lie between a length and its double:

    blocks     1, 2, 3 ... 128, 130, 132 ... 256, 260, 264 ... 512, 520 ...

A prompt of n > 128 blocks has about 64 log2(n / 32) hashes: 512 for 128k tokens in blocks of 16.
The length that two prompts share is known exactly up to 128 blocks, and to 1/64 beyond.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.jit import compiled
from sgl_vllm.protocol.cache_namespace import SHARED, CacheNamespace

Prompt = NDArray[np.integer] | bytes
"""Token ids, shape (n,), or the text in UTF-8 where there is no tokenizer."""

BYTES_PER_TOKEN = 4
"""An estimate for text; exact for packed tokens. So a block of either has as many bytes."""

HASHES_PER_DOUBLING = 64
"""How many lengths are hashed between a long length and its double."""

_GAP_LOGS = np.repeat(np.arange(25), [2 * HASHES_PER_DOUBLING] + 24 * [HASHES_PER_DOUBLING])
_LENGTHS = np.cumsum(1 << _GAP_LOGS)  # every hashed length, in blocks, up to 2**31
_LENGTH_LIST: list[int] = _LENGTHS.tolist()

_HASH_BITS = 60  # Python stores a larger integer in 48 bytes instead of 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class PrefixHashes(NamedTuple):
    """The hashes of one prompt's prefixes, shortest first.

    Attributes:
        hashes: in [0, 2**60), shape (n,). `prefix_length(i + 1)` is the length of the i-th prefix.
        num_tokens: of the whole prompt; estimated for text.
    """

    hashes: NDArray[np.int64]
    num_tokens: int


def seed_of(namespace: CacheNamespace, kind: str) -> int:
    """The 64-bit hash state of the empty prefix. `kind` is "tokens" or "text". About 1 us. Not
    cached: clients choose salts, of any number and, before an engine refuses them, of any length.
    """
    digest = hashlib.blake2b(repr((*namespace, kind)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def prefix_length(num_hashes: int) -> int:
    """The length, in blocks, of the longest of a prompt's first `num_hashes` hashed prefixes."""
    return _LENGTH_LIST[num_hashes - 1] if num_hashes else 0


class PrefixHasher:
    """Hashes the prefixes of prompts. Stateless.

    A block's digest is NH of UMAC (Black et al., CRYPTO 1999) over its 4-byte words. The *state* of
    a prefix mixes the digest of its last block into the state of the prefix before it. So one pass
    yields all states, and a prompt can be continued from any block. Two different prefixes get the
    same hash with a probability of about 2**-32, unless they are constructed to. A collision costs
    a worse choice of worker, nothing else.

    Cost: 7 us for a prompt of 7k tokens; 18 us for one of 99k, or 50 us if it is in no CPU cache.
    """

    def __init__(self, block_size: int = 16) -> None:
        """Compiles the loops, or loads them from disk, which takes up to a second.

        Raises:
            ValueError: `block_size` is not a positive even number.
        """
        if block_size < 2 or block_size % 2:
            raise ValueError(f"block_size must be a positive even number, not {block_size}")
        self.block_size = block_size
        self._constants = np.random.default_rng(0).integers(0, 1 << 32, block_size, dtype=np.uint32)
        for empty in (b"", np.empty(0, dtype=np.int32)):
            self.hash_prompt(empty)

    def hash_prompt(self, prompt: Prompt, namespace: CacheNamespace = SHARED) -> PrefixHashes:
        """The hashes of all hashed prefixes of a prompt."""
        if isinstance(prompt, bytes):
            num_tokens, kind = -(-len(prompt) // BYTES_PER_TOKEN), "text"
        else:
            num_tokens, kind = len(prompt), "tokens"
        states = self.states(self.blocks(prompt), seed_of(namespace, kind))
        _, hashes = self.hashes_of(states, 0)
        return PrefixHashes(hashes, num_tokens)

    def blocks(self, prompt: Prompt) -> NDArray[np.uint32]:
        """The full blocks of a prompt, shape (blocks, words per block)."""
        if isinstance(prompt, bytes):
            words = np.frombuffer(prompt, np.uint32, len(prompt) // BYTES_PER_TOKEN)
        else:
            words = np.ascontiguousarray(prompt, dtype=np.int32).view(np.uint32)
        num_blocks = len(words) // self.block_size
        return words[: num_blocks * self.block_size].reshape(num_blocks, self.block_size)

    def states(self, blocks: NDArray[np.uint32], state: int) -> NDArray[np.uint64]:
        """The state after each of `blocks`, which continue a prefix with this state."""
        return _states(blocks, self._constants, np.uint64(state))

    def hashes_of(
        self, states: NDArray[np.uint64], num_before: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The hashed ones of the prefixes with these `states`: lengths in blocks, and hashes.

        Args:
            num_before: the blocks before the first of `states`, whose prefix has one more.
        """
        begin, end = (bisect_right(_LENGTH_LIST, n) for n in (num_before, num_before + len(states)))
        lengths = _LENGTHS[begin:end]
        return lengths, _hashes(states, lengths, num_before)


@compiled
def _states(
    blocks: NDArray[np.uint32], constants: NDArray[np.uint32], state: np.uint64
) -> NDArray[np.uint64]:
    """See `PrefixHasher`. Words of a block's first half are multiplied with those of its second, so
    that the compiler can vectorize the loop.

    Bounds: a state for each block. There is a constant for each word of a block.
    """
    assert len(constants) >= blocks.shape[1]
    states = np.empty(len(blocks), np.uint64)
    half = blocks.shape[1] // 2
    for i in range(len(blocks)):
        for j in range(half):
            one = np.uint32(blocks[i, j] + constants[j])
            other = np.uint32(blocks[i, half + j] + constants[half + j])
            state += np.uint64(one) * np.uint64(other)
        state *= _MULTIPLIER
        state ^= state >> np.uint64(32)
        states[i] = state
    return states


@compiled
def _hashes(
    states: NDArray[np.uint64], lengths: NDArray[np.int64], num_before: int
) -> NDArray[np.int64]:
    """The finalizer of SplitMix64 over state and length.

    Bounds: a hash for each length. Lengths ascend, and are of prefixes that have a state.
    """
    if len(lengths):
        assert lengths[0] > num_before and lengths[-1] - num_before <= len(states)
    hashes = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        value = states[length - num_before - 1] + np.uint64(length) * _MULTIPLIER
        value ^= value >> np.uint64(30)
        value *= np.uint64(0xBF58476D1CE4E5B9)
        value ^= value >> np.uint64(27)
        value *= np.uint64(0x94D049BB133111EB)
        hashes[i] = value >> np.uint64(64 - _HASH_BITS)
    return hashes
