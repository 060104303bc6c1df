"""vLLM's waiting queue, in the order of `policy.py`.

Owns: what is known of each waiting request (its cached prefix, its hints), kept true at a bounded
cost per step, and who is held back for a step. Does not own the order itself.

vLLM asks for the head of the queue once for every request that it could admit, and pops it or not;
so a step in which nothing can be admitted costs nothing here.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.counters import counter
from sgl_vllm.part import EngineView, Part
from sgl_vllm.protocol.hints import hints_in
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.radix.node import NO_MATCH, Match, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, common_prefix_length
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.policy import WaitingQueue
from sgl_vllm.scheduler.traces import RequestTraces

logger = init_logger("vllm.sgl_vllm.schedule")

Result = TypeVar("Result")


def _unsupported(engine: EngineView) -> str | None:
    is_caching = engine.vllm_config.cache_config.enable_prefix_caching
    return None if is_caching else "prefix caching is off (--no-enable-prefix-caching)"


PART = Part("schedule", _unsupported)

MAX_SCORED = 64
"""So many requests are matched in one step at most: 5 us each, and 16 ns per token of a new one."""

STOCK_SCORE_AGE_S = 0.5
"""How long a request's score by vLLM's own cache is used, with `radix` off."""

MIN_ALIKE_TOKENS = 16
"""Prompts that go on alike for so many tokens after what they match stand together."""

MIN_SAVED_TOKENS = 192
"""To hold requests back for a step has to save computing so many tokens, all of them together. A
step costs about as much as so many tokens: 6 ms against 32 us for 8 billion weights on an H100."""

MIN_SAVED_TOKENS_ON_CPU = 16
"""A CPU computes no more tokens while it reads the weights: a step costs as much as some ten, 6 ms
against 0.5 ms for 33 million weights on a core."""

HOLD_WINDOW = 64
"""So many requests are looked at in one step for whether they are held back."""

_NEW = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
"""Of requests that did not run yet; the grammar may be there already."""

MAY_BE_HELD = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)

WANTED_WINDOW = 128
"""What so many at the head of the queue match is evicted last."""


class PrefixScores:
    """What is cached of each waiting request.

    A request is matched when it has come, and again when the tree has changed where its match ends;
    no more than `MAX_SCORED` in one step.
    """

    def __init__(self, manager: KVCacheManager, radix: RadixKVCacheManager | None) -> None:
        self._manager = manager
        self._radix = radix
        self._tree = radix.tree if radix is not None else None
        self._to_score: dict[Request, None] = {}
        self._scored_at = 0.0

    def add(self, request: Request) -> None:
        self._to_score[request] = None

    def discard(self, request: Request) -> None:
        self._to_score.pop(request, None)
        if self._tree is not None:
            self._tree.watchers.unwatch(request)

    def refresh(self, line: WaitingQueue[Request]) -> None:
        """Score who has come, and whose score may have changed."""
        self._find_changed(line)
        for request in list(itertools.islice(self._to_score, MAX_SCORED)):
            del self._to_score[request]
            if request.skip_reading_prefix_cache:
                continue
            if self._tree is not None:
                self._score_by_tree(request, line)
            else:
                line.score(request, self._match_stock(request))

    def _find_changed(self, line: WaitingQueue[Request]) -> None:
        if self._tree is not None:
            assert self._radix is not None
            if self._radix.tree is self._tree:
                changed = cast("list[Request]", self._tree.watchers.take_changed())
                self._to_score.update((r, None) for r in changed if r in line)
                return
            self._tree = None  # switched off by an error: from here on vLLM's own cache counts
        if time.monotonic() - self._scored_at > STOCK_SCORE_AGE_S:
            self._scored_at = time.monotonic()
            self._to_score.update(dict.fromkeys(line))

    def _score_by_tree(self, request: Request, line: WaitingQueue[Request]) -> None:
        assert self._radix is not None and self._tree is not None
        match = self._radix.match(request)
        trail = self._radix.pool.state_of(request)
        if trail is None or self._radix.tree is None:
            line.score(request, NO_MATCH)
            return
        self._tree.watchers.watch(request, trail.namespace, trail.tokens, match)
        start = match.num_tokens * TOKEN_BYTES
        next_tokens = trail.tokens[start : start + MIN_ALIKE_TOKENS * TOKEN_BYTES]
        branch = None
        if len(next_tokens) == MIN_ALIKE_TOKENS * TOKEN_BYTES:
            branch = hash((match.node or trail.namespace, match.num_tokens, next_tokens)) >> 1
            branch &= 2**62 - 1
        line.score(request, match, branch)

    def _match_stock(self, request: Request) -> Match:
        _, num_tokens, *_ = self._manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return Match(num_tokens, None)


@dataclasses.dataclass(slots=True)
class OrderCounters:
    """What the queue did since start."""

    ordered_steps: int = counter(
        "Steps with an order to decide, because two or more requests waited. Steps in which "
        "nothing could run count too, so this can exceed `forward_passes`.",
        unit="steps",
    )
    overtakes: int = counter(
        "Times a later request was admitted before a waiting one.",
        unit="times",
        old_metric="passes",
    )
    held_back: int = counter(
        "Times a request waited one step for a prefix that another request was computing.",
        unit="times",
    )


class CacheAwareQueue(RequestQueue):
    """The queue of those who wait and hold no blocks.

    In the middle of a step it is False while all in it are held back: then there is nobody to
    admit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        line: WaitingQueue[Request],
        radix: RadixKVCacheManager | None,
        fairness: DeficitCounters | None,
        traces: RequestTraces | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._line = line
        self._traces = traces
        self._scores = PrefixScores(scheduler.kv_cache_manager, radix)
        self._radix = radix
        self._fairness = fairness
        self._has_priorities = scheduler.policy == SchedulingPolicy.PRIORITY
        self._clients: WeakKeyDictionary[Request, Hashable] = WeakKeyDictionary()
        self._order: list[Request] = []  # of this step, or still of an earlier one
        self._is_in_order = False
        self._place = 0  # in the order: all before it were looked at
        self._next: Request | None = None  # of these, who is neither popped nor held back
        self._num_looked_at = 0
        self._held_branches: dict[int, str] = {}  # in this step
        self._leaders: WeakKeyDictionary[Request, str] = WeakKeyDictionary()
        self._wanted: set[Node] | None = None
        on_cpu = scheduler.vllm_config.device_config.device_type == "cpu"
        self.min_saved_tokens = MIN_SAVED_TOKENS_ON_CPU if on_cpu else MIN_SAVED_TOKENS
        self.failed = False
        """Switched off by an error: first come, first served from then on."""
        self.counters = OrderCounters()

    # -- a step -------------------------------------------------------------------------------

    def step_starts(self) -> None:
        self._next = self._wanted = None
        self._is_in_order = False
        self._place = self._num_looked_at = 0
        self._held_branches = {}

    def step_ends(self, scheduler_output: SchedulerOutput) -> None:
        """Who was popped and not put back has been admitted."""
        num_scheduled = scheduler_output.num_scheduled_tokens
        admitted = self._line.popped
        if admitted:
            if self._fairness is not None:
                # Also if nobody else waits: one who has the machine alone runs up no debt.
                self._safely(self._fairness.without_credit, self._line.clients)
            num_cached = [
                r.num_computed_tokens - num_scheduled.get(r.request_id, 0) for r in admitted
            ]
            for request in admitted:
                self._scores.discard(request)
                if self._traces is not None:
                    self._traces.admitted(request, self._line.passes_of(request))
            self.counters.overtakes += self._safely(self._line.settle, num_cached) or 0
        if not self._line:
            self._order = []
        if self._fairness is not None:
            self._safely(self._charge, self._fairness, num_scheduled)

    def _charge(self, fairness: DeficitCounters, num_scheduled: Mapping[str, int]) -> None:
        for request_id, num_tokens in num_scheduled.items():
            client = self._clients.get(self._scheduler.requests[request_id])
            fairness.charge(client, num_tokens)

    def _put_in_order(self) -> None:
        """Once in a step."""
        if self._is_in_order:
            return
        self._is_in_order = True
        order = None if self.failed else self._safely(self._policy_order)
        self._order = self._line.by_arrival() if order is None else order

    def _safely(self, do: Callable[..., Result], *args: Any) -> Result | None:
        """The result; None if it fails, and from then on it is first come, first served."""
        try:
            return do(*args)
        except Exception:
            logger.exception(
                "putting the queue in order failed; it is served as it came from now on. "
                "Please report this with the lines below"
            )
            self.failed = True
            return None

    def _policy_order(self) -> list[Request]:
        if len(self._line) < 2:
            return list(self._line)
        self._scores.refresh(self._line)
        self.counters.ordered_steps += 1
        pool = self._scheduler.kv_cache_manager.block_pool
        room_tokens = pool.get_num_free_blocks() * self._scheduler.block_size
        last: Collection[Hashable] = ()
        if self._fairness is not None:
            last = self._fairness.without_credit(self._line.clients)
        return self._line.order(time.time(), room_tokens=room_tokens, last_clients=last)

    def _find_next(self) -> Request | None:
        """The first who waits and is not held back; None if there is nobody.

        Stays the same until popped: vLLM peeks at a request, gives it blocks, and then pops it.
        """
        self._put_in_order()
        while self._next is None and self._place < len(self._order):
            request = self._order[self._place]
            self._place += 1
            if request in self._line and not self._safely(self._is_held_back, request):
                self._next = request
        return self._next

    def _is_held_back(self, request: Request) -> bool:
        """Whether `request` waits for the next step, because one that was admitted in this one, or
        is not through its prompt yet, computes what both begin with.

        vLLM lets a request share whole blocks of what has been scheduled before it, this step
        included. So there is something to save where blocks are large, or a prompt is computed in
        several parts. A request waits for one other only, as long as that one is at its prompt, and
        not if it is overdue.
        """
        if (
            self.failed
            or self._radix is None
            or self._radix.tree is None
            or request.status not in MAY_BE_HELD
            or request.skip_reading_prefix_cache
            or self._line.is_overdue(request)
        ):
            return False
        branch = self._line.branch_of(request)
        leader = self._held_branches.get(branch)
        if leader is None and self._num_looked_at < HOLD_WINDOW:
            self._num_looked_at += 1
            leader = self._find_leader(request)
            if leader is not None and branch >= 0:
                self._held_branches[branch] = leader
        if leader is None or self._leaders.setdefault(request, leader) != leader:
            return False
        self.counters.held_back += 1
        return True

    def _find_leader(self, request: Request) -> str | None:
        """The id of a request that `request`, with those that go on alike, should wait for."""
        assert self._radix is not None
        trail = self._radix.pool.state_of(request)
        if trail is None:
            return None
        num_shared = self._radix.num_shared_now(request)
        place = num_shared * TOKEN_BYTES
        next_token = trail.tokens[place : place + TOKEN_BYTES]
        for other in self._at_their_prompt():
            other_trail = self._radix.pool.state_of(other)
            if (
                other_trail is None
                or other_trail.namespace != trail.namespace
                or not other_trail.tokens.startswith(next_token, place)
            ):
                continue
            num_common = common_prefix_length(other_trail.tokens, trail.tokens)
            num_common = min(num_common, request.num_tokens - 1)
            if (num_common - num_shared) * self._line.num_alike(request) >= self.min_saved_tokens:
                return other.request_id
        return None

    def _at_their_prompt(self) -> Iterator[Request]:
        """Who has been admitted in this step, and who was running at its start with a part of the
        prompt left."""
        for request in reversed(self._line.popped):
            if request.status == RequestStatus.RUNNING:
                yield request
        for request in self._scheduler.running:
            if request.is_prefill_chunk:
                yield request

    def wanted(self) -> set[Node]:
        """What those at the head of the queue begin with, so that it is not evicted to make room
        for others. The same set for a whole step; costs nothing in a step that evicts nothing."""
        if self._wanted is None:
            self._put_in_order()
            if len(self._line) == 1:  # else it has been done
                self._safely(self._scores.refresh, self._line)
            waiting = (request for request in self._order if request in self._line)
            nodes = map(self._line.node_of, itertools.islice(waiting, WANTED_WINDOW))
            self._wanted = {node for node in nodes if node is not None}
        return self._wanted

    # -- vLLM's queue -------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self._add(request, first=False)

    def prepend_request(self, request: Request) -> None:
        self.prepend_requests([request])

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back who was popped in this step, at the old place; others at the head."""
        for request in requests:
            if not self._line.put_back(request):
                self._add(request, first=True)

    def _add(self, request: Request, first: bool) -> None:
        client = client_of(request)
        self._line.add(
            request,
            request.num_tokens,
            arrival_s=request.arrival_time,
            priority=request.priority if self._has_priorities else 0,
            client=client if self._fairness is not None else None,
            fork_group=fork_group_of(request, client),
            first=first,
        )
        self._scores.add(request)
        if self._fairness is not None:
            self._clients[request] = client

    def peek_request(self) -> Request:
        request = self._find_next()
        if request is None:
            raise IndexError("nobody waits who may be admitted in this step")
        return request

    def pop_request(self) -> Request:
        request = self.peek_request()
        self._next = None
        self._line.pop(request)
        return request

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Those of them who are here."""
        for request in requests:
            if request in self._line:
                self._line.discard(request)
                self._scores.discard(request)
                if request is self._next:
                    self._next = None

    def __len__(self) -> int:
        return len(self._line)

    def __bool__(self) -> bool:
        if not self._line:
            return False
        scheduler = self._scheduler
        no_room = len(scheduler.running) >= scheduler.max_num_active_reqs  # nobody will ask further
        return no_room or self._find_next() is not None

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line.by_arrival())


def client_of(request: Request) -> Hashable:
    """Whose request it is: the tenant and adapter, as the cache tells them apart."""
    lora = request.lora_request
    return request.cache_salt, lora.lora_name if lora is not None else None


def fork_group_of(request: Request, client: Hashable) -> Hashable:
    """What the request says of itself in `extra_args` (HTTP: `vllm_xargs`); None for nothing."""
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    hints = hints_in(extra, request.request_id)
    return None if hints.fork_group is None else (client, *hints)
