"""Why prompt tokens were not read from the cache.

Owns the causes, their counters, and the explanations of the last requests. Does not own the lookup
(`lookup.py`), nor what was evicted (`evicted_prefixes.py`). Imports no vLLM.

Each prompt token that a request computes at its first admission has one cause. From the hit on:

    in the tree   [0 ....................................... match)
    read          [0 ... hit)
    missed                   [- cached, but not readable -)[- evicted -)[- never cached here -)
                              whole_blocks, component,      evicted,     differs, new,
                              drafter, scored, last_token   expired,
                                                            flushed

A request that cannot read the tree misses its tokens for one cause: `skipped` or `part_off`.
What a KV connector loads is not missed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple  # Any: JSON

from sgl_vllm.counters import counter
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.request_ids import is_of_client
from sgl_vllm.radix.node import Match
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, unpack
from sgl_vllm.radix.tree import RadixTree

MAX_REQUESTS = 1000
"""Explanations that are kept. Each takes about a kilobyte."""

MAX_TEXT_TOKENS = 16
"""Of each side, where a prompt differs from what is cached."""

Json = dict[str, Any]


NOT_CACHED = "not_cached"
"""Stands for all causes of tokens that are not in the tree, where they must not be told apart."""


def _cause(help: str, cause: str) -> int:
    return counter(help, unit="tokens", metric="missed_tokens", labels={"cause": cause})


@dataclass(slots=True)
class MissCounters:
    """Prompt tokens that were computed, by cause. The causes add up to `missed_prompt_tokens`."""

    missed_prompt_tokens: int = counter(
        "Prompt tokens that requests computed at their first admission, because they were neither "
        "read from the cache nor loaded by a KV connector.",
        unit="tokens",
    )
    new: int = _cause(
        "These tokens by cause: never cached, as far as the server remembers.",
        "new",
    )
    differs: int = _cause("From where the prompt differs from what is cached.", "differs")
    evicted: int = _cause("Evicted to make room.", "evicted")
    expired: int = _cause("Evicted because of `radix_ttl_s`.", "expired")
    flushed: int = _cause("Removed when the cache was emptied.", "flushed")
    whole_blocks: int = _cause(
        "Cached, but the hit was cut to whole blocks: there was no room for a copy of the last "
        "one, too many were copied in this step, or this step computes it.",
        "whole_blocks",
    )
    component: int = _cause(
        "Cached in full attention, but a window's block or a recurrent state is missing.",
        "component",
    )
    drafter: int = _cause("Cached, but the drafter reads one token ahead.", "drafter")
    scored: int = _cause("Cached, but computed to score them.", "scored")
    last_token: int = _cause("Cached, but at least one token has to run.", "last_token")
    skipped: int = _cause(
        "Of requests that do not read the cache: for prompt log-probabilities, or with streaming "
        "input.",
        "skipped",
    )
    part_off: int = _cause(
        "Of requests since an error or the self-check has switched the tree off, as far as vLLM's "
        "own cache did not have them.",
        "part_off",
    )

    def add(self, cause: str, num_tokens: int) -> None:
        """These tokens, which `missed_prompt_tokens` counts already, have this cause."""
        setattr(self, cause, getattr(self, cause) + num_tokens)


CAUSES = tuple(one.name for one in fields(MissCounters) if one.name != "missed_prompt_tokens")
"""Why a token was not read from the cache."""


class Difference(NamedTuple):
    """Where a prompt differs from what is cached: the next tokens of both."""

    prompt: Tokens
    cached: Tokens


Detail = float | Difference | None
"""Of an eviction, how many seconds before the lookup it was. Of a prompt that differs, where, if
this may be shown."""

Missed = tuple[int, str, Detail]
"""Tokens that were missed for one cause: up to which, from where the last cause ends."""


class Explanation(NamedTuple):
    """One request, as it was first admitted.

    Attributes:
        salt: of its namespace.
        num_read: tokens read from the cache.
        num_loaded: further tokens that a KV connector loads.
        missed: why the others are not read, in order; the last cause ends with the prompt.
        admitted_at: seconds on the monotonic clock.
    """

    salt: str | None
    num_prompt_tokens: int
    num_read: int
    num_loaded: int
    missed: Sequence[Missed]
    admitted_at: float


def not_read(num_read: int, ends: Iterable[tuple[int, str]]) -> list[Missed]:
    """The tokens after the first `num_read` that are cached but not read: up to each end for that
    cause. An end at or before the last one has no tokens."""
    missed: list[Missed] = []
    for end, cause in ends:
        if end > num_read:
            missed.append((end, cause, None))
            num_read = end
    return missed


class Misses:
    """The explanations of the last requests, and the sums of all.

    Args:
        block_size: tokens per block of full attention.
        is_exact: whether answers about requests without a salt are exact, not in whole blocks.
        shows_text: whether they have the texts where a prompt differs from what is cached.
    """

    def __init__(self, block_size: int, *, is_exact: bool, shows_text: bool) -> None:
        self.counters = MissCounters()
        self._block_size = block_size
        self._is_exact = is_exact
        self._shows_text = shows_text
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        self._missed: list[Missed] = []
        """By the request that was looked up last."""

    def forget(self) -> None:
        """Begin again, as if no request had been."""
        self.counters = MissCounters()
        self._explanations.clear()

    # -- at a lookup --------------------------------------------------------------------------

    def not_looked_up(self, num_prompt_tokens: int, cause: str) -> None:
        """The request that may be admitted next does not read the tree."""
        self._missed = [(num_prompt_tokens, cause, None)]

    def looked_up(
        self,
        missed: list[Missed],
        tree: RadixTree,
        namespace: CacheNamespace,
        tokens: Tokens,
        match: Match,
        num_prompt_tokens: int,
    ) -> None:
        """The request that may be admitted next has this match, of which it does not read the
        tokens in `missed`. The match is made since the last change of the tree.

        Costs another match, in what was evicted, if anything was in this namespace.
        """
        self._missed = missed
        position, node = match
        if position >= num_prompt_tokens:
            return
        now, last = tree.clock(), None
        for end, eviction in tree.evictions.of(namespace, tokens, position):
            if position == num_prompt_tokens:
                break
            position = min(end, num_prompt_tokens)
            if eviction.reason == last:  # at another time
                missed[-1] = (position, *missed[-1][1:])
            else:
                missed.append((position, eviction.reason, now - eviction.at))
            last = eviction.reason
        if position >= num_prompt_tokens:
            return
        is_continued = node is not None and (match.num_tokens < node.end or node.children)
        if position > match.num_tokens or not is_continued:
            missed.append((num_prompt_tokens, "new", None))
            return
        difference = None
        if self._shows_text and namespace.salt is None:
            offset = position * TOKEN_BYTES
            next_tokens = tokens[offset : offset + MAX_TEXT_TOKENS * TOKEN_BYTES]
            difference = Difference(next_tokens, _next_cached(match))
        missed.append((num_prompt_tokens, "differs", difference))

    # -- at the admission ---------------------------------------------------------------------

    def admitted(
        self,
        request_id: str,
        salt: str | None,
        num_prompt_tokens: int,
        num_read: int,
        num_loaded: int,
    ) -> None:
        """The request that was looked up last is admitted for the first time. See `Explanation` for
        the arguments."""
        counters, missed = self.counters, self._missed
        start = num_read + num_loaded
        if start < num_prompt_tokens:
            counters.missed_prompt_tokens += num_prompt_tokens - start
        for cause, num_tokens in _by_cause(start, missed):
            counters.add(cause, num_tokens)
        explanations = self._explanations
        explanations[request_id] = Explanation(
            salt, num_prompt_tokens, num_read, num_loaded, missed, time.monotonic()
        )
        if len(explanations) > MAX_REQUESTS:
            explanations.popitem(last=False)

    # -- answers ------------------------------------------------------------------------------

    def explain(self, request_id: str, salt: str | None, now: float) -> list[Json]:
        """The explanations of all requests of which `request_id` is the id that their client knows,
        the oldest first. None of another salt. O(explanations)."""
        answers = []
        for name, one in self._explanations.items():
            if one.salt != salt or not is_of_client(name, request_id):
                continue
            age_s = round(now - one.admitted_at, 3)
            answers.append({"request": name, "age_s": age_s, **self._to_json(one)})
            for _, _, detail in one.missed:
                if isinstance(detail, Difference):
                    answers[-1]["prompt"] = {"tokens": unpack(detail.prompt)}
                    answers[-1]["cached"] = {"tokens": unpack(detail.cached)}
        return answers

    def num_missed(self, request_id: str) -> tuple[int, int]:
        """How many prompt tokens a request computed at its first admission, and how many of these
        had been evicted, or could not be read because a window or a state had; zeros if it is
        forgotten."""
        one = self._explanations.get(request_id)
        if one is None:
            return 0, 0
        start = one.num_read + one.num_loaded
        by_cause = _by_cause(start, one.missed)
        num_evicted = sum(num for cause, num in by_cause if cause in ("evicted", "component"))
        return max(0, one.num_prompt_tokens - start), num_evicted

    def of_request(self, request_id: str) -> Json | None:
        """The explanation of one request, without texts, for the answer to its client; None if it
        is forgotten."""
        explanation = self._explanations.get(request_id)
        return None if explanation is None else self._to_json(explanation)

    def _to_json(self, one: Explanation) -> Json:
        """Without exact numbers, it follows from the whole blocks of what is cached: a client may
        not find out where in a block its prompt differs from another client's."""
        is_exact = self._is_exact or one.salt is not None
        size = 1 if is_exact else self._block_size
        num_read = one.num_read - one.num_read % size
        first = one.num_read + one.num_loaded
        position = first = min(first - first % size, one.num_prompt_tokens)
        causes: list[Json] = []
        for end, cause, detail in one.missed:
            if not is_exact and cause in _NOT_IN_TREE:
                break
            if not is_exact and cause not in _NOT_LOOKED_UP:
                end -= end % size
            if end > position:
                causes.append({"cause": cause, "start": position, "end": end})
                if is_exact and isinstance(detail, float):
                    causes[-1]["before_s"] = round(detail, 3)
                position = end
        if position < one.num_prompt_tokens:
            causes.append({"cause": NOT_CACHED, "start": position, "end": one.num_prompt_tokens})
        return {
            "num_prompt_tokens": one.num_prompt_tokens,
            "num_cached_tokens": num_read,
            "num_loaded_tokens": first - num_read,
            "num_missed_tokens": one.num_prompt_tokens - first,
            "block_size": self._block_size,
            "exact": is_exact,
            "causes": causes,
        }


def _by_cause(start: int, missed: Iterable[Missed]) -> Iterator[tuple[str, int]]:
    """How many of the tokens from `start` on were missed for each cause, in order."""
    for end, cause, _ in missed:
        if end > start:
            yield cause, end - start
            start = end


_NOT_IN_TREE = frozenset(("new", "differs", "evicted", "expired", "flushed"))
_NOT_LOOKED_UP = frozenset(("skipped", "part_off"))


def _next_cached(match: Match) -> Tokens:
    """The next tokens of a cached sequence that continues a match, at most `MAX_TEXT_TOKENS`. There
    is one."""
    node = match.node
    assert node is not None
    offset = (match.num_tokens - node.start) * TOKEN_BYTES
    if offset == len(node.tokens):
        node, offset = next(iter(node.children.values())), 0
    return node.tokens[offset : offset + MAX_TEXT_TOKENS * TOKEN_BYTES]
