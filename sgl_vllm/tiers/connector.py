"""A live KV connector below the tree: asked only where a load can pay off. Its hits are counted.

Owns which of vLLM's questions reach the connector, and the measurements that `load_rule` needs.
Does not own what is stored and loaded, which is up to the connector. vLLM asks a connector only for
tokens after the whole blocks of the tree's hit, and takes its answer only if that goes further than
the tree's partial block.

                 in the tree            | partial |
    hit      [0 ........................|... hit) |        the partial block is copied, unless
    load                                |------------ loaded ------------)  reaches further
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any  # Any: counters
from weakref import WeakKeyDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from sgl_vllm.degrade import Guard
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.tiers.load_rule import LoadRule
from sgl_vllm.vllm_api.patching import wrap

logger = init_logger("vllm.sgl_vllm.tiers")


@dataclass(frozen=True, slots=True)
class TierStats:
    """The constants of the load rule in seconds, None while they are unknown.

    Attributes:
        break_even_tokens: loads of at least this many tokens pay off; None if no load does.
    """

    connector: str
    load_fixed_s: float | None
    load_token_s: float | None
    compute_token_s: float | None
    break_even_tokens: float | None


@dataclass(slots=True)
class _Answer:
    """The last answer to vLLM about a request.

    Attributes:
        is_async: whether the connector would load between forward passes.
        declined: how many tokens were found but are not loaded. 0 if the connector was not asked;
            None if nothing was declined.
    """

    is_async: bool = False
    declined: int | None = None


class Tiers(StepHooks):
    """The scheduler's connector, with the load rule in front of it.

    The rule does not apply to requests that say where their KV is (`kv_transfer_params`), nor to
    loads within a forward pass, whose time cannot be separated from the pass.

    A load that would reach the last token before the first scored one is declined: this token has
    to be computed, as its logits are the first score.

    Args:
        connector: the scheduler's. Two of its methods are replaced in place, so every reference
            to it stays valid.
        radix: its counters count.
    """

    def __init__(
        self, connector: KVConnectorBase_V1, radix: RadixKVCacheManager, rule: LoadRule
    ) -> None:
        self._radix = radix
        self._rule = rule
        self._connector = connector
        wrap(connector, "get_num_new_matched_tokens")(self._ask)
        wrap(connector, "update_state_after_alloc")(self._allocated)
        self._answers: WeakKeyDictionary[Request, _Answer] = WeakKeyDictionary()
        """By waiting request."""
        self._loads: dict[str, tuple[int, float]] = {}
        """By request id: tokens that are being loaded, and since when."""
        self._passes: dict[int, tuple[int, float]] = {}
        """By the scheduler output's id: tokens to compute, and when the pass could begin."""
        self._last_pass_ended = 0.0
        self._loads_in_pass = False
        self._guard = Guard(
            "the rule for KV loads", "all that the connector finds is loaded", logger
        )

    # -- the connector's methods --------------------------------------------------------------

    def _ask(
        self,
        original: Callable[[Request, int], tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        answer = self._answers[request] = _Answer()
        has_choice = not (request.kv_transfer_params or request.skip_reading_prefix_cache)
        if has_choice and self._guard.run(self._is_too_short, request, num_computed_tokens):
            answer.declined = 0
            return 0, False
        found, answer.is_async = original(request, num_computed_tokens)
        first_scored = self._radix.first_scored.get(request)
        if found and first_scored is not None and num_computed_tokens + found >= first_scored:
            # A load cannot be cut short, because connectors rely on what they offered.
            return 0, False
        if has_choice and found and self._guard.run(self._rule.declines, found):
            answer.declined = found
            return 0, False
        return found, answer.is_async

    def _is_too_short(self, request: Request, num_local: int) -> bool:
        """Whether the longest possible load would be declined. Then the connector is not asked,
        because asking may already read from a disk. For a preempted request it is always asked:
        vLLM's own connector may still be storing its blocks."""
        most = request.num_tokens - num_local
        most -= most % self._radix.block_size
        return most > 0 and not request.num_preemptions and self._rule.declines(most)

    def _allocated(
        self,
        original: Callable[[Request, KVCacheBlocks, int], None],
        request: Request,
        blocks: KVCacheBlocks,
        num_external_tokens: int,
    ) -> None:
        """A request is admitted, and tokens are loaded for it. If its load is done already, there
        is no new answer for it."""
        original(request, blocks, num_external_tokens)
        answer = self._answers.pop(request, None)
        if answer is not None:
            self._guard.run(self._count, request, answer, num_external_tokens)

    def _count(self, request: Request, answer: _Answer, num_external: int) -> None:
        counters = self._radix.counters
        is_first = not request.num_preemptions
        if answer.declined is not None:
            self._rule.declined()
            counters.tier_declined_tokens += is_first * answer.declined
            counters.tier_requests_not_asked += is_first * (answer.declined == 0)
        if not num_external:
            return
        if answer.is_async:
            self._loads[request.request_id] = num_external, time.perf_counter()
        else:
            self._loads_in_pass = True
        if is_first:
            if not hasattr(self._connector, "get_external_cache_hit_sources"):  # vLLM 0.31
                counters.other_tier_hit_tokens += num_external
                return
            sources = self._connector.get_external_cache_hit_sources(request, num_external)
            for tier, num_tokens in sources.items():
                counters.record_tier_hit(tier.value, num_tokens)

    def _measure_loads(self, output: KVConnectorOutput) -> None:
        now = time.perf_counter()
        has_failed = bool(output.invalid_block_ids or output.failed_recving)
        for request_id in output.finished_recving or ():
            num_tokens, since = self._loads.pop(request_id, (0, now))
            if not has_failed:
                self._rule.loaded(num_tokens, now - since)

    # -- around a forward pass ----------------------------------------------------------------

    def after_schedule(self, output: SchedulerOutput) -> Iterable[tuple[Request, int]]:
        """A pass begins."""
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens and not self._loads_in_pass:
            self._passes[id(output)] = num_tokens, time.perf_counter()
        self._loads_in_pass = False
        return ()

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """A pass ends. It began when it was scheduled, or when the previous pass ended."""
        if sampled.kv_connector_output is not None:
            self._guard.run(self._measure_loads, sampled.kv_connector_output)
        now = time.perf_counter()
        num_tokens, since = self._passes.pop(id(scheduled), (0, now))
        self._rule.passes.add(num_tokens, now - max(since, self._last_pass_ended))
        self._last_pass_ended = now

    def renew(self) -> None:
        """Forget what was measured."""
        self._rule.forget()
        self._passes.clear()

    # -- errors and statistics ----------------------------------------------------------------

    def sections(self) -> Mapping[str, Any]:
        load, compute = self._rule.loads.fit(), self._rule.passes.fit()
        break_even = self._rule.break_even
        stats = TierStats(
            connector=type(self._connector).__name__,
            load_fixed_s=load.fixed_s if load else None,
            load_token_s=load.token_s if load else None,
            compute_token_s=compute.token_s if compute else None,
            break_even_tokens=break_even if break_even < float("inf") else None,
        )
        return {"tiers": stats}
