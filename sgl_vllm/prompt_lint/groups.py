"""Which prompts of a log belong together: those of one application, whatever their faults.

Pure.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from sgl_vllm.prompt_lint.prompts import Prompt

SHINGLE_WORDS = 8
SAMPLED = 8
"""One of as many shingles is looked at."""
MAX_CHARACTERS = 20_000
"""Of each prompt, from its beginning on, are looked at."""


def groups_of(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indexes of prompts, group by group: two prompts of one model are in one group if they have a
    run of words in common, or are linked by others that have. Both orders are the log's.

    The runs are sampled by their checksum, so that the same text is found at any place, at a cost
    that is linear in the prompts' length.
    """
    parents = list(range(len(prompts)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    first: dict[tuple[str, int], int] = {}
    for index, prompt in enumerate(prompts):
        for shingle in _shingles(prompt):
            other = first.setdefault((prompt.model, shingle), index)
            one, two = sorted((root(index), root(other)))
            parents[two] = one
    groups: dict[int, list[int]] = {}
    for index in range(len(prompts)):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


def _shingles(prompt: Prompt) -> set[int]:
    """Checksums of a prompt's runs of words: a sample, and the smallest."""
    checksums = set()
    for part in prompt.parts:
        words = re.findall(r"\w+", part.text[:MAX_CHARACTERS])
        for start in range(max(len(words) - SHINGLE_WORDS + 1, 0)):
            checksums.add(zlib.crc32(" ".join(words[start : start + SHINGLE_WORDS]).encode()))
    smallest = {min(checksums)} if checksums else set()
    return smallest | {checksum for checksum in checksums if checksum % SAMPLED == 0}
