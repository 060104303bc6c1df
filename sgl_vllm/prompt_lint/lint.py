"""Lints a log of prompts: which faults it has, and how many tokens each of them costs.

Owns which prompts belong together, and what counts as a finding. A saving is never estimated: the
prompts are replayed with and without the fault. Pure.
"""

from __future__ import annotations

import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_vllm.prompt_lint.faults import Fault, detect
from sgl_vllm.prompt_lint.prompts import Prompt
from sgl_vllm.prompt_lint.replay import Replay, Reuse, Tokenizer

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
        saved_alone: tokens that are computed no more if only this fault is repaired.
        saved_last: the same if all other faults are repaired already.
        example: index of a request in the log that has it.
    """

    fault: Fault
    num_requests: int
    num_affected: int
    position: int
    saved_alone: int
    saved_last: int
    example: int

    @property
    def cost(self) -> int:
        return max(self.saved_alone, self.saved_last)


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

    Cost: about four replays of the log for each fault of a group.
    """
    replay = Replay(tokenizer)
    now = replay(prompts)
    repaired = list(prompts)
    findings: list[Finding] = []
    for indexes in groups_of(prompts):
        group = [prompts[index] for index in indexes]
        found = _lint_group(group, indexes, replay, MIN_SHARE * now.total)
        findings += found
        for finding in found:
            group = finding.fault.repaired(group)
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
    now = replay(group)
    worth = max(worth, MIN_SAVING * now.total)
    faults = detect(group)
    while True:
        findings = [_measured(fault, faults, group, indexes, now, replay) for fault in faults]
        useful = [finding.fault for finding in findings if finding.cost > worth]
        redundant = [finding.fault for finding in findings if finding.saved_last <= worth]
        if len(useful) < len(faults):
            faults = useful
        elif redundant:
            faults.remove(redundant[-1])
        else:
            return findings


def _measured(
    fault: Fault,
    faults: Sequence[Fault],
    group: Sequence[Prompt],
    indexes: Sequence[int],
    now: Reuse,
    replay: Replay,
) -> Finding:
    others = list(group)
    for other in faults:
        if other is not fault:
            others = other.repaired(others)
    alone = now, replay(fault.repaired(group))
    last = replay(others), replay(fault.repaired(others))
    saved_alone, saved_last = (before.computed - after.computed for before, after in (alone, last))
    before, after = alone if saved_alone >= saved_last else last
    pairs = enumerate(zip(before.num_cached, after.num_cached, strict=True))
    affected = [index for index, (cached, more) in pairs if more > cached]
    positions = [before.num_cached[index] for index in affected]
    return Finding(
        fault,
        num_requests=len(group),
        num_affected=len(affected),
        position=round(statistics.median(positions or [0])),
        saved_alone=saved_alone,
        saved_last=saved_last,
        example=indexes[affected[0] if affected else 0],
    )
