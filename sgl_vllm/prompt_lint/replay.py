"""How much of each prompt a prefix cache has, when prompts come one after the other.

Owns the replay. The cache keeps everything and finds the longest common prefix to the token, so
what is missing is the prompts' doing, not the cache's. Pure.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sgl_vllm.prompt_lint.prompts import Prompt

Tokenizer: TypeAlias = Callable[[str], Sequence[int]]
"""Token ids of a text, without special tokens."""

TOKEN_BYTES = 4


class Words:
    """Stands in for a tokenizer: words, at most eight characters of each, and other characters.

    Counts are within a quarter of real ones for English and code, which is enough to rank faults.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.setdefault(word, len(ids)) for word in re.findall(r" ?\w{1,8}|\s+|.", text)]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a replay found.

    Attributes:
        num_tokens: of each prompt.
        num_cached: of each prompt, how many were in the cache. At most all but one, because the
            last token is always computed.
    """

    num_tokens: tuple[int, ...]
    num_cached: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.num_tokens)

    @property
    def cached(self) -> int:
        return sum(self.num_cached)

    @property
    def computed(self) -> int:
        return self.total - self.cached


class Replay:
    """Replays prompts. Tokenizes each text once.

    Cost: O(tokens) to tokenize, and per prompt a search among those before it, a comparison of
    their bytes at each step. 2,000 prompts of 4,000 tokens take about a second.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[str, bytes] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> Reuse:
        caches: dict[tuple[str, str], list[bytes]] = {}
        num_tokens: list[int] = []
        num_cached: list[int] = []
        for prompt in prompts:
            tokens = b"".join(self._packed(part.text) for part in prompt.parts)
            # Sorted. The longest common prefix with any of them is with a neighbor.
            earlier = caches.setdefault((prompt.model, prompt.salt), [])
            index = bisect(earlier, tokens)
            neighbors = earlier[max(index - 1, 0) : index + 1]
            common = max((_common_prefix(tokens, other) for other in neighbors), default=0)
            earlier.insert(index, tokens)
            count = len(tokens) // TOKEN_BYTES
            num_tokens.append(count)
            num_cached.append(min(common, max(count - 1, 0)))
        return Reuse(tuple(num_tokens), tuple(num_cached))

    def _packed(self, text: str) -> bytes:
        """Token ids as big-endian bytes, which sort as the ids do."""
        packed = self._tokens.get(text)
        if packed is None:
            ids = self._tokenizer(text)
            packed = self._tokens[text] = struct.pack(f">{len(ids)}I", *ids)
        return packed


def _common_prefix(one: bytes, other: bytes) -> int:
    """Tokens that both begin with. Cost: O(log length) comparisons of bytes."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
