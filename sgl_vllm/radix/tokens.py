"""Packed token ids: four bytes each, so that runs of tokens are compared at memory speed.

Owns the encoding and its comparison. Does not own what an id stands for: `keys.py` also encodes
images as ids. Pure: no vLLM, no torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Tokens = bytes
"""Token ids, packed by `pack`."""

TOKEN_BYTES = 4
"""Size of one packed token."""


def pack(token_ids: Sequence[int]) -> Tokens:
    """Token ids, each in [-2**31, 2**31), as native 32-bit integers. About 7 ns per token. Raises
    struct.error for other ids."""
    return _packer(len(token_ids)).pack(*token_ids)


@lru_cache(1024)
def _packer(num_tokens: int) -> struct.Struct:
    """`struct.pack` would copy all arguments once more."""
    return struct.Struct(f"{num_tokens}i")


def unpack(tokens: Tokens) -> list[int]:
    """The inverse of `pack`."""
    return array("i", tokens).tolist()


def common_prefix_length(edge: Tokens, tokens: Tokens, offset: int = 0) -> int:
    """How many leading tokens of `edge` equal those of `tokens` from byte `offset` on. Both must
    have at least one token there."""
    length = min(len(edge), len(tokens) - offset) // TOKEN_BYTES
    different = np.frombuffer(edge, np.int32, length) != np.frombuffer(
        tokens, np.int32, length, offset
    )
    first = int(different.argmax())
    return first if different[first] else length
