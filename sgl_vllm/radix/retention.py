"""What requests have computed enters the tree, so that other requests may share it.

Owns which tokens of a request are computed and final, and with which states. Does not own how they
enter the tree (`pool.py`), nor when (`manager.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.request import Request, RequestStatus

from sgl_vllm.radix.components.component import States
from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.node import Namespace, Node
from sgl_vllm.radix.passes import Passes
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.stats import RadixCounters
from sgl_vllm.radix.tokens import Tokens

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from sgl_vllm.radix.pool import RadixBlockPool


class Left(NamedTuple):
    """What a request has left in the tree. vLLM frees the request itself, with all its tokens.

    Attributes:
        last: the last tokens of its answer, two at most.
        num_computed: `RequestRecord.num_computed`.
        leaf: `RequestRecord.leaf`, which may have left the tree since.
        member: `RequestRecord.member`.
        ended_s: when, in seconds on the monotonic clock.
    """

    request_id: str
    namespace: Namespace
    tokens: Tokens
    num_prompt_tokens: int
    last: tuple[int, ...]
    num_computed: int
    leaf: Node | None
    member: object
    is_aborted: bool
    ended_s: float


@dataclass(eq=False)
class Retention:
    """The computed tokens of one cache's requests.

    Attributes:
        left: by the requests that have ended since the last step began.
    """

    _pool: RadixBlockPool
    counters: RadixCounters
    _passes: Passes
    left: list[Left] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups = self._pool.groups

    def retain(self, request: Request) -> None:
        """Put what `request` has computed into the tree, before its blocks are released."""
        blocks = self._groups.main_blocks.get(request.request_id)
        if not blocks:
            return
        record = self._pool.records.of(request)
        self._unindex_uncertain(request, blocks, record.num_found if record is not None else 0)
        if record is None:
            return
        num_tokens, states = self._num_to_index(request, record), None
        if self._groups.recurrent:
            num_tokens, states = self._states_left(request, record, num_tokens)
        # After a failed load, vLLM may count blocks as computed that another request was to load,
        # which has failed too.
        if num_tokens <= 0 or request.status == RequestStatus.FINISHED_ERROR:
            return
        if self._pool.index(request, blocks, num_tokens, is_last_use=True, states=states):
            if states and num_tokens in states:
                self._pool.tree.mark_state(states[num_tokens][0], Kind.END)
            self.counters.retained_tails += num_tokens % self._groups.block_size != 0
            if request.is_finished():
                self.left.append(_left_by(request, record))

    def _unindex_uncertain(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_found: int
    ) -> None:
        """Take out of the tree what `request` was to compute or load, but may never have: it was
        taken out of the step, or its load has failed or may fail yet. Only blocks of its own, not
        those that it found."""
        num_scheduled = self._groups.num_cached_by_request.get(request.request_id, 0)
        num_sure, end = self._pool.loads.num_sure(request), num_scheduled * self._groups.block_size
        if end > num_sure:
            num_kept = max(num_sure, num_found)
            self._pool.unindex(blocks[num_kept // self._groups.block_size : num_scheduled])
            for of_group in self._groups.window_blocks_of(request, num_kept, end):
                self._pool.unindex(of_group)

    def _states_left(
        self, request: Request, record: RequestRecord, num_tokens: int
    ) -> tuple[int, States]:
        """The states that a request leaves behind when it releases its blocks, and how many tokens
        have to enter the tree with them.

        Passes in flight still advance the state, so the blocks will hold the one after their last
        token. It can be indexed only if all these tokens are known by now. Whatever reads it runs
        after these passes.
        """
        end = self._passes.state_end(request)
        if end is not None and end <= request.num_tokens:
            num_tokens = end
        else:
            num_tokens -= num_tokens % self._groups.block_size
        return num_tokens, self._groups.states_of(request, record.num_with_states, num_tokens)

    def index(self, request: Request, num_tokens: int, states: States | None = None) -> None:
        """Put the first tokens of a running request into the tree, if it still has its blocks."""
        if request.num_computed_tokens < num_tokens:
            return
        blocks = self._groups.main_blocks.get(request.request_id)
        if blocks:
            self._pool.index(request, blocks, num_tokens, states=states)

    def index_before_blocks_go(self, request: Request) -> None:
        """Put the whole blocks, of any group, that a running request has computed into the tree,
        and its states after them, unless they have been there."""
        record = self._pool.records.lagging(request)
        if record is None:
            return
        num_tokens = self._num_to_index(request, record)
        if not self._groups.recurrent:
            num_tokens -= num_tokens % self._groups.common_block_size
            if num_tokens > record.num_indexed:
                self.index(request, num_tokens)
            return
        num_tokens -= num_tokens % self._groups.block_size
        if num_tokens > record.num_with_states:
            states = self._groups.states_of(request, record.num_with_states, num_tokens)
            self.index(request, num_tokens, states)
            record.num_with_states = num_tokens

    def num_shareable(self, request: Request) -> int:
        """How many tokens of `request` would be in the tree if it ended now."""
        record = self._pool.records.of(request)
        return 0 if record is None else self._num_to_index(request, record)

    def _num_to_index(self, request: Request, record: RequestRecord) -> int:
        """How many of the request's tokens other requests may share.

        Tokens of a step in flight are not computed yet, and placeholders are no tokens. vLLM counts
        tokens as computed that a connector may still be loading. Of those, only the blocks that
        vLLM has cached itself are there. Tokens past the loaded ones are computed from them.
        """
        # A preempted request has no computed tokens, but may still have tokens in flight.
        num_computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        num_tokens = min(num_computed, request.num_tokens, self._pool.loads.num_sure(request))
        if 0 < num_tokens <= record.num_loaded:
            num_cached = self._groups.num_cached_by_request.get(request.request_id, 0)
            num_tokens = min(num_tokens, num_cached * self._groups.block_size)
        return num_tokens


def _left_by(request: Request, record: RequestRecord) -> Left:
    return Left(
        request.request_id,
        record.namespace,
        record.tokens,
        request.num_prompt_tokens,
        tuple(request.output_token_ids[-2:]),
        record.num_computed,
        record.leaf,
        record.member,
        request.status == RequestStatus.FINISHED_ABORTED,
        time.monotonic(),
    )
