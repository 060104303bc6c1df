"""vLLM's waiting queue, in the order of `policy.py`.

Owns vLLM's queue interface, and what happens once per step around it. Does not own the order
(`policy.py`), the matching of prefixes (`scores.py`), or which requests wait for others
(`sharing.py`).

vLLM peeks at the head of the queue once for every request that it could admit, and pops it or not.
So a step in which no request can be admitted costs nothing here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: counters
from weakref import WeakKeyDictionary, WeakSet

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sgl_vllm.counters import counter
from sgl_vllm.degrade import Guard
from sgl_vllm.part import NO_PREFIX_CACHING, EngineView, Part
from sgl_vllm.programs.admission import MAX_HELD_PER_STEP, Admission, AdmissionGauges
from sgl_vllm.programs.programs import UNKNOWN, Programs
from sgl_vllm.protocol.hints import Hints, read_hints
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.radix.node import Node
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.policy import WaitingQueue
from sgl_vllm.scheduler.rows import MAX_PRIORITY
from sgl_vllm.scheduler.scores import PrefixScores
from sgl_vllm.scheduler.sharing import MIN_SAVED_TOKENS, MIN_SAVED_TOKENS_ON_CPU, PrefillSharing
from sgl_vllm.step_hooks import StepHooks

logger = init_logger("vllm.sgl_vllm.schedule")

WANTED_WINDOW = 128
"""The prefixes of this many requests at the head of the queue are evicted last."""


def _unsupported(engine: EngineView) -> str | None:
    is_caching = engine.vllm_config.cache_config.enable_prefix_caching
    return None if is_caching else NO_PREFIX_CACHING


PART = Part("schedule", _unsupported)


@dataclass(slots=True)
class OrderCounters:
    """What the queue did since start."""

    ordered_steps: int = counter(
        "Steps with an order to decide, because two or more requests waited. Steps in which "
        "nothing could run count too, so this can exceed `forward_passes`.",
        unit="steps",
    )
    overtakes: int = counter(
        "Times a later request was admitted before a waiting one.", unit="times"
    )
    held_back: int = counter(
        "Times a request waited one step for a prefix that another request was computing.",
        unit="times",
    )
    held_for_contexts: int = counter(
        "Requests held back because admitting them would have evicted contexts that were expected "
        "to be continued soon. At most 16 are counted per step.",
        unit="requests",
    )


class CacheAwareQueue(RequestQueue, StepHooks):
    """The waiting requests that hold no blocks.

    In the middle of a step `bool(queue)` is False while all its requests are held back, because
    vLLM can admit none of them; only `Scheduler.schedule` asks for it. Requests that are held back
    are among vLLM's deferred requests until the step ends, so that vLLM does not take them for a
    lack of capacity. In a step in which deciding the order fails, the queue serves in order of
    arrival. Errors in the table of requests itself are not caught.

    The order is decided once per step: when vLLM begins to admit, or when the step begins, if the
    running requests may need blocks that have to be evicted first. With it, the cache is told which
    nodes the head of the queue matches, to evict these last. A request preempted after that is
    missing from the order, which does no harm, because vLLM admits nothing in a step that has
    preempted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: WaitingQueue[Request],
        radix: RadixKVCacheManager | None,
        programs: Programs | None,
        fairness: DeficitCounters | None,
        admission: Admission | None,
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._fairness = fairness
        self._scores = PrefixScores(waiting, scheduler.kv_cache_manager, radix)
        self.sharing: PrefillSharing | None = None
        if radix is not None:
            on_cpu = scheduler.vllm_config.device_config.device_type == "cpu"
            min_saved_tokens = MIN_SAVED_TOKENS_ON_CPU if on_cpu else MIN_SAVED_TOKENS
            self.sharing = PrefillSharing(scheduler, waiting, radix, min_saved_tokens)
        self._programs = programs
        self._admission = admission
        self._held: set[Request] = set()  # of `_deferred`, those held for contexts
        self._num_held = 0  # of these, in the last step that had an order
        self._held_for_contexts: WeakSet[Request] = WeakSet()  # those that have been counted
        self._deferred: set[Request] = set()  # those that are held back in this step
        self._radix = radix
        self._has_priorities = scheduler.policy == SchedulingPolicy.PRIORITY
        self._tenants: WeakKeyDictionary[Request, Hashable] = WeakKeyDictionary()
        self._order: list[Request] = []  # of this step, or still of an earlier one
        self._evicted_last = self._order  # the one whose head the cache was told of
        self._is_in_order = False
        self._place = 0  # requests of the order before it have been looked at
        self._next: Request | None = None  # neither popped nor held back
        self._guard = Guard(
            "the order of the queue",
            "requests are served in order of arrival in this step",
            logger,
        )
        self.counters = OrderCounters()

    @property
    def num_errors(self) -> int:
        """Unexpected errors so far. Each is in the log."""
        return self._guard.num_errors

    def sections(self) -> Mapping[str, Any]:
        return {"schedule": copy.copy(self.counters), "admission": self.admission_gauges()}

    def admission_gauges(self) -> AdmissionGauges | None:
        """How agents take turns at this moment; None if they never do."""
        return self._admission.gauges(self._num_held) if self._admission is not None else None

    # -- a step -----------------------------------------------------------------------------------

    def before_schedule(self, prompts_done: Sequence[Request]) -> None:
        self._next = None
        self._is_in_order = False
        self._place = 0
        if self.sharing is not None:
            self._guard.run(self.sharing.step_starts)
        if self._admission is not None:
            self._guard.run(self._admission.step_starts)
        if self._programs is not None:
            self._programs.step_starts()
        if self._may_evict():
            self._decide_order()

    def after_schedule(self, output: SchedulerOutput) -> Iterable[tuple[Request, int]]:
        """Count the requests that were popped and not put back as admitted."""
        self._scheduler.deferred_waiting -= self._deferred
        self._deferred.clear()
        if self._is_in_order or not self._waiting:
            self._num_held = len(self._held)
        self._held.clear()
        num_scheduled = output.num_scheduled_tokens
        admitted = self._waiting.popped
        if admitted:
            if self._fairness is not None:
                # No order has been decided if these requests were alone.
                self._guard.run(self._fairness.refill_if_due, self._waiting.tenants)
            num_cached = [
                r.num_computed_tokens - num_scheduled.get(r.request_id, 0) for r in admitted
            ]
            for request, num in zip(admitted, num_cached, strict=True):
                self._guard.run(self._scores.discard, request)
                if self._admission is not None and not request.num_preemptions:
                    self._guard.run(self._count_admission, self._admission, request, num)
            self.counters.overtakes += self._settle(num_cached)
        self._forget_order_if_empty()
        requests = self._scheduler.requests
        self.charge((requests[name], number) for name, number in num_scheduled.items())
        return ()

    def charge(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Charge the tokens that a step computes of each request to its tenant."""
        if self._fairness is not None:
            self._guard.run(self._charge, self._fairness, computed)

    def _count_admission(self, admission: Admission, request: Request, num_cached: int) -> None:
        if self._waiting.is_agent(request):
            waited_s = time.monotonic() - self._waiting.arrival_s_of(request)
            admission.admitted(request, tenant_of(request), num_cached, waited_s)

    def _settle(self, num_cached: Sequence[int]) -> int:
        try:
            return self._waiting.settle(num_cached)
        except Exception:  # the popped requests are released all the same
            self._guard.record()
            return 0

    def _charge(self, fairness: DeficitCounters, computed: Iterable[tuple[Request, int]]) -> None:
        for request, num_tokens in computed:
            fairness.charge(self._tenants.get(request), num_tokens)

    def _decide_order(self) -> None:
        """Decide the order of this step, unless that is done."""
        if self._is_in_order:
            return
        self._is_in_order = True
        order = self._guard.run(self._policy_order)
        self._order = self._waiting.by_arrival() if order is None else order
        scheduler = self._scheduler
        if (
            self._radix is not None
            and self._order is not self._evicted_last
            and self._radix.may_evict(
                scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens
            )
        ):
            if len(self._waiting) == 1:  # a queue of one has no order, so it is not scored
                self._guard.run(self._scores.refresh)
            self._radix.evict_last(self.nodes_of_head())
            self._evicted_last = self._order

    def _forget_order_if_empty(self) -> None:
        """Nothing is evicted last for requests that wait no longer."""
        if not self._waiting and self._order:
            self._order = self._evicted_last = []
            if self._radix is not None:
                self._radix.evict_last(())

    def _policy_order(self) -> list[Request]:
        if len(self._waiting) < 2:
            return list(self._waiting)
        self._scores.refresh()
        self.counters.ordered_steps += 1
        last: Collection[Hashable] = ()
        if self._fairness is not None:
            self._fairness.refill_if_due(self._waiting.tenants)
            last = self._fairness.without_credit(self._waiting.tenants)
        room_tokens = self._room_tokens()
        hold_s = self._admission.hold_s if self._admission is not None else 0.0
        return self._waiting.order(
            time.monotonic(), room_tokens=room_tokens, last_tenants=last, hold_s=hold_s
        )

    def _may_evict(self) -> bool:
        """Whether the running requests may need blocks of what waiting requests match."""
        if self._radix is None or not self._waiting:
            return False
        running = self._scheduler.running
        if not self._radix.may_evict(len(running), self._scheduler.max_num_scheduled_tokens):
            return False
        return self._radix.may_evict(len(running), 0) or any(
            request.is_prefill_chunk for request in running
        )

    def _room_tokens(self) -> int:
        """How many tokens fit into the free and evictable blocks."""
        manager = self._scheduler.kv_cache_manager
        num_free = manager.block_pool.get_num_free_blocks()
        if self._radix is not None:
            return self._radix.groups.tokens_in(num_free)
        # `Groups` takes only the layouts that `radix` supports. Nearly always, blocks of all groups
        # have one size.
        return (
            num_free * self._scheduler.block_size // len(manager.coordinator.single_type_managers)
        )

    def _find_next(self) -> Request | None:
        """The first waiting request that is not held back; None if there is none.

        Stays the same until it is popped, because vLLM peeks at a request, allocates its blocks,
        and then pops it.
        """
        self._decide_order()
        while self._next is None and self._place < len(self._order):
            request = self._order[self._place]
            self._place += 1
            if request not in self._waiting or request in self._held:
                continue
            if not self._is_held_back(request):
                self._next = request
                if self.sharing is not None:
                    self._guard.run(self.sharing.note_siblings, request)
            else:
                self._defer({request})
                if len(self._held) == MAX_HELD_PER_STEP and request in self._held:
                    self._hold_all()
        return self._next

    def _hold_all(self) -> None:
        """Hold back all further requests that could be, without checking whether they fit."""
        assert self._admission is not None
        arrived_after_s = time.monotonic() - self._admission.hold_s
        held = self._waiting.cold_agents(self._order[self._place :], arrived_after_s)
        self._held |= held
        self._defer(held)

    def _defer(self, requests: set[Request]) -> None:
        """These requests are held back until the step ends."""
        requests = requests - self._scheduler.deferred_waiting
        self._scheduler.deferred_waiting |= requests
        self._deferred |= requests

    def _is_held_back(self, request: Request) -> bool:
        if self._guard.run(self._waits_for_contexts, request):
            self._held.add(request)
            if request not in self._held_for_contexts:
                self._held_for_contexts.add(request)
                self.counters.held_for_contexts += 1
            return True
        if self.sharing is not None and self._guard.run(self.sharing.waits_for_leader, request):
            self.counters.held_back += 1
            return True
        # A request sent ahead of time is admitted only if no other request waits.
        return bool(self._held) and hints_of(request).is_ahead

    def _waits_for_contexts(self, request: Request) -> bool:
        admission = self._admission
        if admission is None or not admission.hold_s or not self._scheduler.running:
            return False
        if not self._waiting.is_agent(request) or request.num_preemptions:
            return False
        if time.monotonic() - self._waiting.arrival_s_of(request) >= admission.hold_s:
            return False
        self._scores.score(request)
        return admission.waits(request, self._waiting.match_of(request))

    def nodes_of_head(self) -> set[Node]:
        """The nodes that the head of the queue, in the last order, is known to match."""
        return self._guard.run(self._matched_by_head) or set()

    def _matched_by_head(self) -> set[Node]:
        return self._waiting.nodes_of(self._order[:WANTED_WINDOW])

    # -- vLLM's queue -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self._add(request, is_readmission=False)

    def prepend_request(self, request: Request) -> None:
        self.prepend_requests([request])

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Return requests popped in this step to their old places, and put others at the head."""
        for request in requests:
            if not self._waiting.put_back(request):
                self._add(request, is_readmission=True)

    def _add(self, request: Request, is_readmission: bool) -> None:
        tenant, hints = tenant_of(request), hints_of(request)
        priority = request.priority if self._has_priorities else 0
        standing = UNKNOWN
        if self._programs is not None and not is_readmission:
            standing = self._programs.arrived(request, hints)
        self._waiting.add(
            request,
            request.num_tokens,
            arrival_s=time.monotonic() - max(0.0, time.time() - request.arrival_time),
            priority=MAX_PRIORITY if hints.is_ahead else priority,
            tenant=tenant if self._fairness is not None else None,
            fork_group=None if hints.fork is None else (tenant, hints.fork),
            num_served=standing.num_served,
            is_agent=standing.is_agent and request.priority >= 0,
            is_readmission=is_readmission,
        )
        self._guard.run(self._scores.add, request)
        if self._fairness is not None:
            self._tenants[request] = tenant

    def peek_request(self) -> Request:
        request = self._find_next()
        if request is None:
            raise IndexError("no waiting request can be admitted in this step")
        return request

    def pop_request(self) -> Request:
        request = self.peek_request()
        self._next = None
        self._waiting.pop(request)
        return request

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of `requests` that wait here."""
        for request in requests:
            if request in self._waiting:
                self._waiting.discard(request)
                self._guard.run(self._scores.discard, request)
                if request is self._next:
                    self._next = None
        self._forget_order_if_empty()

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        if not self._waiting:
            return False
        scheduler = self._scheduler
        # If all request slots are taken, vLLM does not ask which request is next.
        has_no_slot = len(scheduler.running) >= scheduler.max_num_active_reqs
        return has_no_slot or self._find_next() is not None

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.by_arrival())


def tenant_of(request: Request) -> Hashable:
    """The tenant of a request: its `cache_salt` and LoRA adapter, which isolate its cache too."""
    lora = request.lora_request
    return request.cache_salt, lora.lora_name if lora is not None else None


def hints_of(request: Request) -> Hints:
    params = request.sampling_params
    return read_hints(params.extra_args if params is not None else None, request.request_id)
