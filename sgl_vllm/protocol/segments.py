"""Segments of a prompt whose order does not matter, and the canonical order for them.

The canonical order depends on the segments' texts alone, so prompts with the same segments begin
alike in all processes. Owns that order. Pure.
"""

from __future__ import annotations

import hashlib


def digest_of(text: str) -> bytes:
    """What stands for a segment's text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def canonical_rank(digest: bytes, seed: int = 0) -> bytes:
    """Segments in canonical order are sorted by it. Each `seed` is another order."""
    return hashlib.blake2b(str(seed).encode() + b" " + digest).digest()
