"""Which parts an engine has, and how they are put together.

Owns the order in which parts are asked and built, and the log line that names them. Does not own
why a part is off, which each part says itself (`part.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any  # Any: methods of any kind

from sgl_vllm.approximate import part as approximate
from sgl_vllm.approximate.characters import TokenTexts
from sgl_vllm.approximate.reuse import ApproximateReuse
from sgl_vllm.fsm.vllm import part as fsm
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.jump import part as jump
from sgl_vllm.jump.jump import JumpForward
from sgl_vllm.jump.report import ForcedReports
from sgl_vllm.part import BY_OPTION, EngineView, Part, SchedulerFacts
from sgl_vllm.programs.admission import MAX_HOLD_S, Admission
from sgl_vllm.programs.programs import Programs
from sgl_vllm.radix import part as radix
from sgl_vllm.radix.lookup import max_copies
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.scheduler import queue, select
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.policy import Bound, WaitingQueue
from sgl_vllm.scheduler.queue import CacheAwareQueue
from sgl_vllm.scheduler.refusals import Refusals
from sgl_vllm.scheduler.select import ScoredRequests
from sgl_vllm.scheduler.stats import ON
from sgl_vllm.self_check.plan import Plan, marker_for, plan_for
from sgl_vllm.speculation import drafting_of
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.tiers.connector import Tiers
from sgl_vllm.tiers.load_rule import LoadRule
from sgl_vllm.version import __version__

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from sgl_vllm.config import Options

logger = logging.getLogger("vllm.sgl_vllm")

PARTS: tuple[Part, ...] = (radix.PART, queue.PART, fsm.PART, jump.PART, select.PART)
"""In the order in which they are asked: a part may depend on those before it."""

FAILED = "switched off by an error: see the log"
"""The state of the tree after an error (`degrade.py`)."""


@dataclass(slots=True)
class Parts:
    """The parts of one engine, None for those that it does not have.

    Attributes:
        scheduler: vLLM's part of the scheduler.
        engine: the engine as the parts saw it.
        off: why each part that is off by choice, from the start or since the self-check, is off.
        plan: whether the engine is to be checked before it serves.
        programs: present with `radix` and `queue`.
        tiers, approximate: present if a KV connector or their option asks for them.
        grammars: also present with `fsm` off, for jumps.
        refusals: present with `grammars`.
    """

    scheduler: Scheduler
    engine: EngineView
    off: dict[str, str]
    plan: Plan = field(default_factory=Plan)
    radix: RadixKVCacheManager | None = None
    queue: CacheAwareQueue | None = None
    programs: Programs | None = None
    grammars: SglBackend | None = None
    jump: JumpForward | None = None
    select: ScoredRequests | None = None
    reports: ForcedReports | None = None
    refusals: Refusals | None = None
    tiers: Tiers | None = None
    approximate: ApproximateReuse | None = None
    _at_moments: dict[Callable[..., Any], list[StepHooks]] = field(default_factory=dict, init=False)

    def have_changed(self) -> None:
        """To be called when a part was set after the engine was built."""
        self._at_moments.clear()

    def that_have(self, moment: Callable[..., Any]) -> list[StepHooks]:
        """The parts that do something at a moment of `StepHooks`, in the order in which they get
        their turn before a pass."""
        found = self._at_moments.get(moment)
        if found is None:
            name = moment.__name__
            found = [part for part in self._hooks() if getattr(type(part), name) is not moment]
            self._at_moments[moment] = found
        return found

    def _hooks(self) -> Iterator[StepHooks]:
        """The order before a pass; after it, the order is reversed. Jumps come before the queue,
        because a jump may free blocks that the queue's order depends on. After a pass, reports come
        before approximate reuse, which adds to them."""
        for part in (
            *(self.radix, self.programs, self.approximate, self.refusals),
            *(self.reports, self.jump, self.queue, self.tiers, self.select),
        ):
            if part is not None:
                yield part

    def states(self) -> dict[str, str]:
        """For each part `ON`, or why it is off."""
        return {part.name: self.why_off(part.name) or ON for part in PARTS}

    def why_off(self, name: str) -> str | None:
        """Why a part is off; None if it is on."""
        has_failed = name == radix.PART.name and self.radix is not None and self.radix.failed
        return self.off.get(name) or (FAILED if has_failed else None)

    def switch_off(self, name: str, reason: str) -> None:
        """Leave the work of a part that the self-check compares to vLLM from now on. To be called
        when no request runs."""
        self.off[name] = reason
        if name == radix.PART.name and self.radix is not None and not self.radix.is_off:
            self.radix.pool.switch_off(f"off: {reason}")
        elif name == fsm.PART.name and self.grammars is not None:
            self.grammars.leave_to_stock()
        elif name == jump.PART.name:
            self.jump = self.reports = None
        elif name == select.PART.name:
            self.select = None
        self.have_changed()

    def num_errors(self, name: str) -> int:
        """Unexpected errors of a part so far. Each is in the log."""
        if name == radix.PART.name:  # its first error switches it off
            return int(self.radix is not None and self.radix.failed)
        parts = {
            queue.PART.name: self.queue,
            fsm.PART.name: self.grammars,
            jump.PART.name: self.jump,
        }
        part = parts.get(name)
        return part.num_errors if part is not None else 0

    def token_bytes(self) -> tuple[Sequence[bytes], int]:
        """The bytes of each token, empty for special ones, and the token that ends a text."""
        manager = self.scheduler.structured_output_manager
        return fsm.token_bytes_reader(self.engine, manager, self.grammars)()


def decide(
    scheduler: SchedulerFacts, kv_cache_config: KVCacheConfig, options: Options
) -> tuple[EngineView, dict[str, str], Plan]:
    """The engine as the parts see it, why those that are off are off, and what the self-check will
    do. Changes nothing, so it can also be asked about an engine that does not exist."""
    off: dict[str, str] = {}
    plan = plan_for(scheduler, options)
    engine = EngineView(scheduler, kv_cache_config, options, off, plan.off)
    for part in PARTS:
        if (reason := part.why_off(engine)) is not None:
            off[part.name] = reason
    return engine, off, plan


def build_parts(scheduler: Scheduler, kv_cache_config: KVCacheConfig, options: Options) -> Parts:
    """Decide which parts `scheduler` can have, build these, and say so in one line of the log.

    Changes the scheduler's KV cache manager, waiting queue, connector and structured-output
    manager. `scheduler` is one of vLLM's, otherwise ready to serve.
    """
    engine, off, plan = decide(SchedulerFacts.of(scheduler), kv_cache_config, options)
    if plan.runs and options.self_check == "on":
        marker_for(engine.scheduler, options).forget()

    def is_on(part: Part) -> bool:
        return part.name not in off

    parts = Parts(scheduler, engine, off, plan)
    if is_on(radix.PART):
        parts.radix = _build_radix(parts)
        if is_on(select.PART):
            parts.select = ScoredRequests(parts.radix)
        if scheduler.connector is not None:
            is_measured = options.tier_rule == "measured"
            rule = LoadRule(min_tokens=options.tier_min_tokens, measured=is_measured)
            parts.tiers = Tiers(scheduler.connector, parts.radix, rule)
    if is_on(queue.PART):
        _build_queue(parts)
    if is_on(fsm.PART) or (is_on(jump.PART) and options.jump_mode == "canonical"):
        parts.grammars = fsm.install_backend(engine, scheduler.structured_output_manager)
        parts.refusals = Refusals()
    if is_on(jump.PART):
        _build_jump(parts)
    if options.approximate_reuse:
        if reason := approximate.why_off(engine):
            logger.warning("sgl-vllm: approximate_reuse has no effect: %s", reason)
        else:
            parts.approximate = _build_approximate(parts)
    if not plan.runs:
        log_states(parts)
    return parts


def renew(parts: Parts) -> None:
    """Make the parts as they were at start: counters, fairness. To be called when no request
    runs or waits, and the cache is empty."""
    for part in parts.that_have(StepHooks.renew):
        part.renew()
    if parts.grammars is not None:
        parts.grammars.forget()
    if parts.queue is not None:
        _build_queue(parts)
    if parts.jump is not None:
        _build_jump(parts)
    if parts.select is not None and parts.radix is not None:
        parts.select = ScoredRequests(parts.radix)
    parts.have_changed()


def _build_radix(parts: Parts) -> RadixKVCacheManager:
    scheduler, engine = parts.scheduler, parts.engine
    return RadixKVCacheManager.adopt(
        scheduler.kv_cache_manager,
        engine.options,
        max_copies=max_copies(engine.kv_cache_config),
        has_connector=scheduler.connector is not None,
        drafting=drafting_of(engine.vllm_config),
    )


def _build_queue(parts: Parts) -> None:
    scheduler, options = parts.scheduler, parts.engine.options
    bound = Bound(
        max_overtakes=options.schedule_max_overtakes,
        max_delay=options.schedule_max_delay,
        max_wait_s=options.schedule_max_wait_s or float("inf"),
    )
    quantum = options.schedule_fair_quantum
    admission = None
    if parts.radix is not None:
        parts.programs = Programs(parts.radix)
        if options.schedule_admission == "auto" and options.schedule_policy == "lpm":
            max_hold_s = min(MAX_HOLD_S, bound.max_wait_s)
            admission = Admission(parts.radix, parts.programs, max_hold_s)
    parts.queue = CacheAwareQueue(
        scheduler,
        WaitingQueue(options.schedule_policy, bound, options.schedule_window),
        parts.radix,
        parts.programs,
        DeficitCounters(quantum) if quantum else None,
        admission,
    )
    scheduler.waiting = parts.queue


def _build_jump(parts: Parts) -> None:
    scheduler, engine = parts.scheduler, parts.engine
    read = fsm.token_bytes_reader(engine, scheduler.structured_output_manager, parts.grammars)

    def token_bytes() -> Sequence[bytes]:
        return read()[0]

    explain = parts.radix.misses.of_request if parts.radix is not None else None
    parts.reports = ForcedReports(token_bytes, explain)
    parts.jump = JumpForward(scheduler, engine.options.jump_mode, parts.reports.forced)


def _build_approximate(parts: Parts) -> ApproximateReuse:
    scheduler, engine = parts.scheduler, parts.engine
    assert parts.radix is not None
    read = fsm.token_bytes_reader(engine, scheduler.structured_output_manager, parts.grammars)
    recompute = engine.options.approximate_recompute

    def token_texts() -> TokenTexts:
        token_bytes, _ = read()
        vocabulary = scheduler.structured_output_manager.tokenizer.get_vocab()
        special = {
            token: text
            for text, token in vocabulary.items()
            if token < len(token_bytes) and not token_bytes[token]
        }
        return TokenTexts(token_bytes, special)

    return ApproximateReuse(scheduler, parts.radix, recompute, token_texts)


def log_states(parts: Parts) -> None:
    """Name every part in one line: a warning if one is off for another reason than its option."""
    off = parts.off
    as_wanted = all(reason == BY_OPTION for reason in off.values())
    states = (
        f"{part.name} off ({off[part.name]})" if part.name in off else f"{part.name} on"
        for part in PARTS
    )
    level = logging.INFO if as_wanted else logging.WARNING
    logger.log(level, "sgl-vllm %s: %s", __version__, "; ".join(states))
