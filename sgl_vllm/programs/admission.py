"""Agents take turns while their contexts do not fit into the cache together.

Owns whether requests of agents are held back, which ones, and for how long. Does not own which
contexts will be continued (`continuations.py`), nor the order of the queue, which asks. Imports no
vLLM at run time.

If the contexts of all active agents do not fit into the cache, each admitted request evicts
another agent's context, and each agent computes its whole context again at every step. It is faster
to serve as many agents as fit, and the next ones when some of these end or pause.

Idea: admission by working sets (Denning, The working set model for program behavior, 1968).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sgl_vllm.counters import counter, gauge, highest
from sgl_vllm.lru_per_tenant import get_or_make
from sgl_vllm.programs.continuations import MAX_TENANTS
from sgl_vllm.radix.node import Match

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.programs.programs import Programs
    from sgl_vllm.radix.manager import RadixKVCacheManager

BEGIN_RATIO, END_RATIO = 1.0, 0.5
"""Turns start when agents recompute more tokens than they compute for the first time, and stop at
half that ratio."""

WINDOW_CACHES = 2
"""Tokens computed this many caches ago count a third as much as those computed now."""

MIN_SHARE = 1 / 8
"""Agents count as if they had computed at least this share of the cache for the first time, so that
a few evictions do not start turns."""

PAUSE_QUANTILE = 0.9
"""The longest hold is at least this quantile of the pauses of agents."""

HOLD_PER_WAIT = 0.75
"""The longest hold is at least this share of the longest recent wait, because requests wait anyway
on an overloaded server."""

WAIT_MEMORY = 16
"""A wait counts a third as much after this many times the longest hold."""

MAX_HOLD_S = 60.0
"""Longest hold. Turns also stop after this many seconds without an admitted agent request."""

READ_PAUSES_EVERY_S = 1.0
"""How old the quantile of the pauses may be."""

MAX_HELD_PER_STEP = 16
"""After a step has held back this many requests, it holds back all other agents' requests with less
than half of the prompt cached, without checking whether they fit."""


@dataclass(slots=True)
class AdmissionGauges:
    """What is held back, and what for."""

    held: int = gauge(
        "Requests of agents that are held back, because what they compute would evict contexts "
        "that will be continued soon.",
        unit="requests",
        metric="held_requests",
    )
    recomputed_tokens: int = counter(
        "Prompt tokens that agents recomputed after an eviction.",
        unit="tokens",
        metric="agent_recomputed_tokens",
    )
    kept_tokens: int = counter(
        "Cached tokens that agents read while agents took turns.",
        unit="tokens",
        metric="agent_kept_tokens",
    )
    holding_s: float = highest(
        "How long agents have been taking turns; 0 if they are not.",
        unit="s",
    )
    hold_s: float = highest(
        "The longest time that a request is held back, as learned; 0 if agents do not take turns.",
        unit="s",
    )
    again_per_new: float = highest(
        "Recent tokens that agents recomputed per token computed for the first time, for the "
        "tenant with the highest ratio.",
        unit="tokens",
    )


class Recomputation:
    """Whether a tenant's agents recompute more tokens than they compute for the first time.

    Args:
        num_cache_tokens: tokens that fit into the cache.
    """

    def __init__(self, num_cache_tokens: int) -> None:
        self._num_cache_tokens = num_cache_tokens
        self._num_again = self._num_first = 0.0
        self._is_high = False
        self._added_s = 0.0

    def is_high(self, now_s: float) -> bool:
        return self._is_high and now_s - self._added_s < MAX_HOLD_S

    def add(self, num_again: int, num_first: int, now_s: float) -> None:
        """An agent recomputes `num_again` tokens and computes `num_first` for the first time."""
        kept = math.exp(-(num_again + num_first) / (WINDOW_CACHES * self._num_cache_tokens))
        if now_s - self._added_s >= MAX_HOLD_S:  # what was before says nothing of now
            kept, self._is_high = 0.0, False
        self._added_s = now_s
        self._num_again = kept * self._num_again + num_again
        self._num_first = kept * self._num_first + num_first
        self._is_high = self.ratio > (END_RATIO if self._is_high else BEGIN_RATIO)

    @property
    def ratio(self) -> float:
        """Recomputed tokens per token computed for the first time."""
        return self._num_again / max(self._num_first, MIN_SHARE * self._num_cache_tokens)


class Admission:
    """Decides which requests wait because what they compute would evict contexts that will be
    continued soon.

    Requests are held back while the agents of any tenant recompute more tokens than they compute
    for the first time. A request is not held back if at least half of it is cached, if it is no
    agent's (`programs.py`), after a preemption, or for more than `hold_s` seconds. Times are
    seconds on the monotonic clock.

    Cost: O(expected contexts) in a step that looks at an agent's evicted context, and about 3 us
    for each request that such a step checks, at most `MAX_HELD_PER_STEP` that are held back.

    Attributes:
        hold_s: longest hold time in this step, in seconds; 0 while agents do not take turns.

    Args:
        max_hold_s: limit for `hold_s`.
    """

    def __init__(
        self, radix: RadixKVCacheManager, programs: Programs, max_hold_s: float = MAX_HOLD_S
    ) -> None:
        self._radix = radix
        self._programs = programs
        self._max_hold_s = max_hold_s
        self._recomputation: OrderedDict[Hashable, Recomputation] = OrderedDict()
        self._longest_wait_s = 0.0  # decays
        self._pause_s = 0.0
        self._pause_read_s = -math.inf
        self._began_s: float | None = None
        self._now_s = 0.0
        self._num_expected_blocks: int | None = None  # in this step, once it is asked for
        self._gauges = AdmissionGauges()
        self.hold_s = 0.0

    def step_starts(self) -> None:
        """Decide whether this step holds requests back, and for how long."""
        self._num_expected_blocks = None
        now_s = time.monotonic()
        if not self._is_any_high(now_s):
            if self._began_s is not None:
                self._began_s, self.hold_s, self._longest_wait_s = None, 0.0, 0.0
                self._programs.expect_within(0.0)
            return
        if self._began_s is None:
            self._began_s = self._now_s = now_s
        if self.hold_s:
            self._longest_wait_s *= math.exp((self._now_s - now_s) / (WAIT_MEMORY * self.hold_s))
        self._now_s = now_s
        if now_s - self._pause_read_s >= READ_PAUSES_EVERY_S:
            self._pause_read_s = now_s
            self._pause_s = self._programs.agent_pause_s(PAUSE_QUANTILE)
        hold_s = max(self._pause_s, HOLD_PER_WAIT * self._longest_wait_s)
        self.hold_s = min(hold_s, self._max_hold_s)
        self._programs.expect_within(self.hold_s)

    def _is_any_high(self, now_s: float) -> bool:
        return any(one.is_high(now_s) for one in self._recomputation.values())

    def waits(self, request: Request, match: Match) -> bool:
        """Whether an agent's request that has waited for less than `hold_s`, and has this match, is
        held back until the next step."""
        if 2 * match.num_tokens >= request.num_tokens:
            return False
        if self._num_expected_blocks is None:
            self._num_expected_blocks = self._programs.num_expected_blocks()
        block_size = self._radix.block_size
        num_needed = -(-(request.num_tokens - match.num_tokens) // block_size)
        num_free_tokens = self._radix.groups.tokens_in(self._radix.block_pool.get_num_free_blocks())
        return (num_needed + self._num_expected_blocks) * block_size > num_free_tokens

    def admitted(
        self, request: Request, tenant: Hashable, num_cached: int, waited_s: float
    ) -> None:
        """An agent's request is admitted for the first time, with so many cached tokens."""
        now_s = time.monotonic()
        if self.hold_s:
            self._gauges.kept_tokens += num_cached
            if not request.priority:  # the others may wait for as long as they like
                self._longest_wait_s = max(self._longest_wait_s, waited_s)
        num_missed, num_evicted = self._radix.misses.num_missed(request.request_id)
        self._gauges.recomputed_tokens += num_evicted
        of_tenant = get_or_make(self._recomputation, tenant, self._new_recomputation, MAX_TENANTS)
        of_tenant.add(num_evicted, num_missed - num_evicted, now_s)

    def _new_recomputation(self) -> Recomputation:
        return Recomputation(self._radix.groups.tokens_in(self._radix.block_pool.num_gpu_blocks))

    def gauges(self, num_held: int) -> AdmissionGauges:
        """The state at this moment, with so many requests held back in the last step."""
        ratios = [one.ratio for one in self._recomputation.values()]
        now_s = time.monotonic()
        # Between two steps, too: an idle engine holds nothing back.
        began_s = self._began_s if self._is_any_high(now_s) else None
        is_holding = began_s is not None
        return replace(
            self._gauges,
            held=num_held if is_holding else 0,
            holding_s=0.0 if began_s is None else round(now_s - began_s, 3),
            hold_s=round(self.hold_s, 3) if is_holding else 0.0,
            again_per_new=round(max(ratios, default=0.0), 2),
        )
