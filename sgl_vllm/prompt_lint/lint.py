"""Lints a log of prompts: which faults it has, and how many tokens each of them costs.

Owns which prompts belong together, and what counts as a finding. A saving is never estimated: the
prompts are replayed with and without the fault, against a cache that keeps everything and finds the
longest common prefix to the token. What is missing then is the prompts' doing, not the cache's.
Pure.
"""

from __future__ import annotations

import re
import statistics
import struct
import zlib
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sgl_vllm.prompt_lint.faults import Fault, detect
from sgl_vllm.prompt_lint.prompts import Prompt

# -- replays --------------------------------------------------------------------------------------

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
    """The length of the common prefix, in tokens. Cost: O(log length) comparisons of bytes."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


# -- findings -------------------------------------------------------------------------------------

MIN_SAVING = 0.01
"""A fault is reported if it costs more than this share of its group's tokens,"""

MIN_SHARE = 0.005
"""and more than this share of all tokens: the report would round less to 0%."""

SHINGLE_WORDS = 8
"""Prompts that have a run of as many words in common belong together."""
SAMPLED = 8
"""One of as many such runs is looked at."""
MAX_CHARACTERS = 20_000
"""Of each prompt, from its beginning on, are looked at."""

Progress = Callable[[int], object]
"""Told how many more requests are done."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, and its cost in prompt tokens that are computed although they need not be.

    Attributes:
        fault: what is wrong, and its repair.
        num_requests: of its group, with the fault or without.
        num_affected: requests that would find more in the cache without it.
        position: from which token on it keeps them from being shared: the median.
        cost: tokens that are computed no more if it is repaired as the last one of its group.
        example: index of a request in the log that has it.
    """

    fault: Fault
    num_requests: int
    num_affected: int
    position: int
    cost: int
    example: int


@dataclass(frozen=True, slots=True)
class LintReport:
    """What linting a log found.

    Attributes:
        now: the replay of the log as it is.
        repaired: the replay with all findings repaired.
        findings: the most expensive first.
    """

    now: Reuse
    repaired: Reuse
    findings: tuple[Finding, ...]


def lint(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, progress: Progress = lambda _: None
) -> LintReport:
    """Finds faults in prompts, which are in the order in which they were sent.

    Cost: about four replays of the log for each candidate for a fault.
    """
    replay = Replay(tokenizer)
    now = replay(prompts)
    repaired = list(prompts)
    findings: list[Finding] = []
    for indexes in groups_of(prompts):
        group: Sequence[Prompt] = [prompts[index] for index in indexes]
        found = _lint_group(group, indexes, replay, MIN_SHARE * now.total)
        findings += found
        group = _repaired(group, [finding.fault for finding in found])
        for index, prompt in zip(indexes, group, strict=True):
            repaired[index] = prompt
        progress(len(indexes))
    findings.sort(key=lambda finding: -finding.cost)
    return LintReport(now, replay(repaired), tuple(findings))


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


def _lint_group(
    group: Sequence[Prompt], indexes: Sequence[int], replay: Replay, worth: float
) -> list[Finding]:
    """The faults that are worth repairing when all others are repaired: that cost more than `worth`
    tokens, and than `MIN_SAVING`.

    Two faults that explain the same cost nothing beside each other. Then the later one goes.
    """
    if len(group) < 2:
        return []
    worth = max(worth, MIN_SAVING * replay(group).total)
    faults = detect(group)
    for fault in faults[::-1]:
        if _measured(fault, faults, group, indexes, replay).cost <= worth:
            faults.remove(fault)
    return [_measured(fault, faults, group, indexes, replay) for fault in faults]


def _measured(
    fault: Fault,
    faults: Sequence[Fault],
    group: Sequence[Prompt],
    indexes: Sequence[int],
    replay: Replay,
) -> Finding:
    before = replay(_repaired(group, [one for one in faults if one is not fault]))
    after = replay(_repaired(group, faults))
    pairs = enumerate(zip(before.num_cached, after.num_cached, strict=True))
    affected = [index for index, (cached, more) in pairs if more > cached]
    positions = [before.num_cached[index] for index in affected]
    return Finding(
        fault,
        num_requests=len(group),
        num_affected=len(affected),
        position=round(statistics.median(positions or [0])),
        cost=before.computed - after.computed,
        example=indexes[affected[0] if affected else 0],
    )


def _repaired(prompts: Sequence[Prompt], faults: Iterable[Fault]) -> Sequence[Prompt]:
    for fault in faults:
        prompts = fault.repaired(prompts)
    return prompts
