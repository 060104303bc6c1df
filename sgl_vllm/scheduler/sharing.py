"""Requests wait one step for a prefix that another request is computing, and then share it.

Owns which waiting requests are held back, and for which request. Does not own the order
(`policy.py`).

vLLM lets a request share whole blocks of what was scheduled before it, in the same step too. So
holding a request back saves work where blocks are large, or where a prompt is computed in chunks:

    step 1     leader     [0 ........... 500)          sibling waits, though it could share [0, 384)
    step 2     sibling    [500 .. 505)                 and not [384 .. 505), with blocks of 128

Log-probabilities of a prompt are shared only once they are there, so a request that asks for them
waits for another that computes them.

With recurrent layers a sibling can go on only where the leader leaves a checkpoint
(`radix/checkpoints.py`). So before a leader is admitted, its prompt is compared with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.radix.node import Namespace
from sgl_vllm.radix.prompt_logprobs import num_tokens_in
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, common_prefix_length
from sgl_vllm.scheduler.policy import WaitingQueue

MIN_SAVED_TOKENS = 192
"""Requests are held back only if that saves computing this many tokens, for all of them together.
Computing this many tokens takes about as long as one step: 6 ms against 32 us per token for 8
billion weights on an H100."""

MIN_SAVED_TOKENS_ON_CPU = 16
"""A CPU is not faster for tokens that share a read of the weights, so a step costs as much as about
ten tokens: 6 ms against 0.5 ms for 33 million weights on one core."""

MAX_COMPARISONS = 512
"""At most about this many pairs of a waiting request and one that computes its prompt are compared
per step: 1 us each, and 4 us if the next token is the same."""

NUM_STEPS_OVERDUE = 2
"""Steps that an overdue request still waits for a leader, at most: one for the last chunk of what
they share, and one for the leader's checkpoint."""

MAX_SIBLINGS = 16
"""A leader's prompt is compared with those of this many waiting requests at most: 1 us each."""

_CAN_WAIT = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
"""Requests that have not run yet. A grammar may be ready before the status changes."""


class _Leader(NamedTuple):
    """A request that others wait for, and how many of their tokens were cached before."""

    request_id: str
    num_shared: int


@dataclass(eq=False)
class PrefillSharing:
    """Decides which requests wait for a leader: a request that was admitted in this step, or has
    not finished its prompt, and computes what both prompts begin with.

    A request waits for a leader while that prefills, and for another one only if more of its prompt
    is cached by then: first for the leader of all, which computes what all prompts begin with, then
    for one of those with the same question. Once the order has found it overdue (a queue of one is
    not ordered), it waits for `NUM_STEPS_OVERDUE` more steps at most. So it loses its leaders'
    steps, and not many.
    """

    _scheduler: Scheduler
    _waiting: WaitingQueue[Request]
    _radix: RadixKVCacheManager
    min_saved_tokens: int
    num_comparisons: int = 0
    """Pairs of requests compared in this step."""
    _leader_of: dict[int, _Leader] = field(default_factory=dict)
    """The leaders found in this step, by the next tokens of those that wait."""
    _leaders: WeakKeyDictionary[Request, _Leader] = field(default_factory=WeakKeyDictionary)
    """The last leader that each request has waited for."""
    _unfinished_prompts: list[Request] | None = None
    """The requests that were prefilling when this step began; None until they are needed."""
    _num_steps: int = 0
    _overdue_since: WeakKeyDictionary[Request, int] = field(default_factory=WeakKeyDictionary)
    """The step in which each request was first found overdue here."""

    def step_starts(self) -> None:
        self._num_steps += 1
        self.num_comparisons = 0
        self._leader_of = {}
        self._unfinished_prompts = None

    def note_siblings(self, request: Request) -> None:
        """Note for a cache that leaves checkpoints what `request`, to be admitted next, shares with
        other waiting requests that have the same next tokens: the lengths of the prefixes, of
        `MAX_SIBLINGS` requests at most. A prompt's last token is always computed."""
        if not self._radix.groups.recurrent or self._radix.is_off:
            return
        record = self._radix.pool.records.of(request)
        if record is None:
            return
        lengths = []
        for sibling in self._waiting.siblings_of(request, MAX_SIBLINGS):
            other = self._radix.pool.records.of(sibling)
            if other is not None and other.namespace == record.namespace:
                num_common = common_prefix_length(record.tokens, other.tokens)
                lengths.append(min(num_common, sibling.num_tokens - 1))
        record.num_shared = lengths

    def waits_for_leader(self, request: Request) -> bool:
        """Whether `request` is held back until the next step."""
        if (
            self._radix.tree is None
            or request.status not in _CAN_WAIT
            or request.skip_reading_prefix_cache
            or (self._waiting.is_overdue(request) and self._has_waited_enough(request))
        ):
            return False
        wanted_rows = self._radix.wanted_rows.get(request)
        if wanted_rows is not None:
            return self._waits_for_logprobs(request, wanted_rows.top_k)
        key = self._waiting.next_tokens_key_of(request)
        leader = self._leader_of.get(key)
        if leader is None and self.num_comparisons < MAX_COMPARISONS:
            leader = self._find_leader(request)
            if leader is not None and key >= 0:
                self._leader_of[key] = leader
        if leader is None:
            return False
        last = self._leaders.get(request)
        if last is None or leader.num_shared > last.num_shared:
            self._leaders[request] = leader
            return True
        return leader.request_id == last.request_id

    def _waits_for_logprobs(self, request: Request, top_k: int) -> bool:
        """Whether another request computes log-probabilities that `request` could then read. Looks
        `request` up only if one computes any."""
        others = [
            other
            for other, wanted in self._radix.wanted_rows.items()
            if other.status == RequestStatus.RUNNING
            and not other.num_output_tokens
            and wanted.top_k >= top_k
        ]
        record = self._radix.pool.records.of(request) if others else None
        if record is None:
            return False
        tree = self._radix.pool.tree
        match = tree.match_prefix(record.namespace, record.tokens)
        num_known = num_tokens_in(tree.logprobs.find(match, top_k))
        num_waiting = self._waiting.num_with_same_next_tokens(request)
        prefix = record.tokens[: (num_known + 1) * TOKEN_BYTES]
        for other in others:
            if self.num_comparisons >= MAX_COMPARISONS:
                return False
            other_record = self._record_with(prefix, record.namespace, other)
            if other_record is not None:
                num_common = common_prefix_length(other_record.tokens, record.tokens)
                if (num_common - num_known) * num_waiting >= self.min_saved_tokens:
                    return True
        return False

    def _has_waited_enough(self, request: Request) -> bool:
        """Whether an overdue request has been given the steps that a leader's last chunk takes."""
        first_step = self._overdue_since.setdefault(request, self._num_steps)
        return self._num_steps - first_step >= NUM_STEPS_OVERDUE

    def _find_leader(self, request: Request) -> _Leader | None:
        """The request that `request` and all others with its next tokens should wait for.

        What the others save is an estimate: it is known only that their next `NUM_NEXT_TOKENS`
        tokens are the same.
        """
        record = self._radix.pool.records.of(request)
        if record is None:
            return None
        # As of its last score, which is never more than it finds, unless a state or a window of it
        # is left in this very step.
        num_shared = self._waiting.match_of(request).num_tokens
        if self._radix.groups.has_others:
            num_shared = 0
        prefix = record.tokens[: (num_shared + 1) * TOKEN_BYTES]
        num_with_same_next_tokens = 0  # counted at the first candidate: most requests have none
        for other in self._prefilling():
            other_record = self._record_with(prefix, record.namespace, other)
            if other_record is None:
                continue
            if not num_with_same_next_tokens:
                num_with_same_next_tokens = self._waiting.num_with_same_next_tokens(request)
                num_shared = self._radix.hit_length_mid_step(request)
                prefix = record.tokens[: (num_shared + 1) * TOKEN_BYTES]
                if not other_record.tokens.startswith(prefix):
                    continue
            num_common = common_prefix_length(other_record.tokens, record.tokens)
            num_common = min(num_common, request.num_tokens - 1)
            if self._radix.groups.recurrent:
                # Of one that it has passed there is a checkpoint already, or there will be none.
                begin = other.num_computed_tokens
                stops = (stop for stop in other_record.stops if begin <= stop <= num_common)
                num_common = max(stops, default=0)
            elif other.num_computed_tokens >= num_common + self._radix.block_size:
                continue  # whole blocks that it has passed are cached, or have been evicted again
            num_saved = (num_common - num_shared) * num_with_same_next_tokens
            if num_saved >= self.min_saved_tokens:
                return _Leader(other.request_id, num_shared)
        return None

    def _record_with(
        self, prefix: Tokens, namespace: Namespace, request: Request
    ) -> RequestRecord | None:
        """The record of a request of the namespace, if its tokens begin like this."""
        self.num_comparisons += 1
        record = self._radix.pool.records.lagging(request)
        is_alike = record and record.tokens.startswith(prefix) and record.namespace == namespace
        return record if is_alike else None

    def _prefilling(self) -> Iterator[Request]:
        """The requests admitted in this step, the last one first, and those that were running
        before it and have not finished their prompt."""
        for request in reversed(self._waiting.popped):
            if request.status == RequestStatus.RUNNING:
                yield request
        if self._unfinished_prompts is None:
            running = self._scheduler.running
            self._unfinished_prompts = [one for one in running if one.is_prefill_chunk]
        for request in self._unfinished_prompts:
            if request.status == RequestStatus.RUNNING:  # not preempted in this step
                yield request
