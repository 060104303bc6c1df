"""What the server asks of one engine: statistics, the radix tree, pins, and its workers' set-up.

Owns the answers' shapes. Does not own how a question reaches the engine's process
(`EngineCore.sgl_vllm_call`) nor the HTTP routes (`routes/`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any  # Any: JSON

from vllm.logger import init_logger

from sgl_vllm.approximate import copies as turned_copies
from sgl_vllm.config import ROUNDS_KEY, Options
from sgl_vllm.jump import full_graphs
from sgl_vllm.part import BY_OPTION
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.block_hashes import BlockHasher
from sgl_vllm.radix.snapshot import NO_CONTEXTS
from sgl_vllm.radix.whole_copies import copy_whole_blocks
from sgl_vllm.scheduler.assembly import Parts, log_states
from sgl_vllm.scheduler.stats import BitmaskCounters, EngineStats, StepCounters
from sgl_vllm.scheduler.step_times import StepTimer
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.version import __version__
from sgl_vllm.vllm_api.runners import take_forced

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from sgl_vllm.self_check.report import CheckReport

logger = init_logger("vllm.sgl_vllm")


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned prefix."""

    pin_id: str
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ListedPin(Pinned):
    """A pinned prefix, and the seconds since it was pinned."""

    age_s: float


@dataclass(frozen=True, slots=True)
class PinAnswer:
    """A prefix that has been pinned, or the reason why it was not."""

    pinned: Pinned | None = None
    error: str = ""


class EngineControl:
    """The engine's answers to routes and commands, and what happens once when the engine core
    starts. No answer changes what requests compute, except that pins keep prefixes in the cache.

    Every answer can be sent as MessagePack: dataclasses, mappings, lists, numbers and text.
    """

    def __init__(
        self,
        parts: Parts,
        options: Options,
        vllm_config: VllmConfig,
        steps: StepCounters,
        bitmasks: BitmaskCounters,
    ) -> None:
        self._parts = parts
        self._options = options
        self._vllm_config = vllm_config
        self._steps = steps
        self._bitmasks = bitmasks
        observability = getattr(vllm_config, "observability_config", None)
        counts_graphs = bool(getattr(observability, "cudagraph_metrics", False))
        self.timer = StepTimer(counts_graphs=counts_graphs)
        self.checked: CheckReport | None = None
        """What the self-check has found, if one has run."""
        self._rounds_hits = False

    def stats(self) -> EngineStats:
        """Counters of every part. Numbers and reasons only, no text of prompts."""
        parts = self._parts
        sections: dict[str, Any] = {}
        for part in parts.that_have(StepHooks.sections):
            sections |= part.sections()
        return EngineStats(
            version=__version__,
            parts=parts.states(),
            steps=copy.copy(self._steps),
            times=self.timer.times,
            graphs=self.timer.graphs,
            fsm=parts.grammars.counters if parts.grammars is not None else None,
            structured_output=copy.copy(self._bitmasks),
            **sections,
        )

    def tree(self, max_nodes: int = 1000, max_text_tokens: int = 128) -> dict[str, Any]:
        """The shape of the radix tree; empty if it is off."""
        radix, queue, programs = self._parts.radix, self._parts.queue, self._parts.programs
        if radix is None:
            return {}
        max_tokens = max_text_tokens if self._options.tree_text else 0
        known, contexts = None, NO_CONTEXTS
        if programs is not None:
            known, contexts = programs.snapshot(shows_tools=max_tokens > 0)
        wanted = queue.nodes_of_head() if queue is not None else ()
        snapshot = radix.snapshot(max_nodes, max_tokens, wanted, contexts)
        if snapshot and known is not None:
            snapshot["programs"] = known
        if snapshot and queue is not None and (gauges := queue.admission_gauges()) is not None:
            snapshot["admission"] = asdict(gauges)
        return snapshot

    def called_tool(self, request_id: str, tool: str) -> None:
        """The answer that its client knows by this id calls `tool`: `Programs.called_tool`."""
        if self._parts.programs is not None:
            self._parts.programs.called_tool(request_id, tool)

    def why(self, request_id: str, cache_salt: str | None = None) -> list[dict[str, Any]]:
        """Why tokens of a request of this salt were not read from the cache: `Misses.explain`."""
        radix = self._parts.radix
        if radix is None:
            return []
        return radix.misses.explain(request_id, cache_salt, time.monotonic())

    def match(
        self,
        candidates: Sequence[bytes],
        prefix: bytes = b"",
        cache_salt: str | None = None,
        lora_name: str | None = None,
        lora_path: str | None = None,
    ) -> list[int] | None:
        """How many tokens of each candidate are cached; None if the tree is off. Changes nothing.

        Without a `cache_salt`, these are whole blocks unless an option says otherwise, as in what a
        client without one is told of its own requests (`routes/incoming.py`).

        Args:
            candidates: token ids, each candidate packed by `radix.tokens.pack`.
            prefix: token ids before each of them, which are sent once.
        """
        radix = self._parts.radix
        if radix is None or radix.is_off:
            return None
        adapter = _adapter(lora_name, lora_path)
        namespace = CacheNamespace(adapter, cache_salt or None)
        lengths = radix.hit_lengths(namespace, [prefix + one for one in candidates])
        size = 1 if cache_salt or self._options.tells_exactly else radix.block_size
        return [length - length % size for length in lengths]

    def pin(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
        lora_path: str | None = None,
    ) -> PinAnswer:
        """Pin the longest cached prefix of `token_ids`."""
        radix = self._parts.radix
        reason = self._parts.why_off("radix")
        if radix is None or reason is not None:
            return PinAnswer(error=f"the radix tree is off: {reason}")
        try:
            pin_id, pin = radix.pins.pin(token_ids, cache_salt, _adapter(lora_name, lora_path))
        except ValueError as error:
            return PinAnswer(error=str(error))
        return PinAnswer(Pinned(pin_id, pin.num_tokens, len(pin.blocks)))

    def unpin(self, pin_id: str) -> bool:
        """Let a pinned prefix be evicted again. Returns whether there was such a pin."""
        radix = self._parts.radix
        return radix is not None and radix.pins.unpin(pin_id)

    def pins(self) -> list[ListedPin]:
        now = time.monotonic()
        radix = self._parts.radix
        return [
            ListedPin(pin_id, pin.num_tokens, len(pin.blocks), round(now - pin.since, 3))
            for pin_id, pin in (radix.pins.all() if radix is not None else {}).items()
        ]

    def round_hit(self, request: Request) -> None:
        """Round an admitted request's reported hit, for frontends without `routes/incoming.py`."""
        radix, told = self._parts.radix, getattr(request, "prefill_stats", None)
        if self._rounds_hits and radix is not None and told is not None and not request.cache_salt:
            told.num_cached_tokens -= told.num_cached_tokens % radix.block_size

    # -- once, when the engine core starts ------------------------------------------------------

    def prepare_workers(self, collective_rpc: Callable[..., list[Any]]) -> None:
        """Make the workers take forced tokens, copy whole blocks, and copy segments with
        `approximate_reuse`. To be called when their KV caches exist."""
        parts = self._parts
        if parts.jump is not None:
            reason = next(filter(None, collective_rpc(take_forced)), None)
            if reason is not None:
                parts.switch_off("jump_forward", reason)
                log_states(parts)
            self._log_graphs(collective_rpc)
        radix = parts.radix
        if radix is None:
            return
        if radix.groups.num_groups > 1:
            radix.pool.guarded(collective_rpc, copy_whole_blocks)
        if parts.approximate is not None:
            reasons = {*collective_rpc(turned_copies.use_in_worker, args=(radix.block_size,))}
            for reason in reasons - {None}:
                logger.warning("sgl-vllm: approximate_reuse has no effect: %s", reason)
            if reasons != {None}:
                parts.approximate = None
                parts.have_changed()
            else:
                parts.approximate.install(parts.scheduler)

    def _log_graphs(self, collective_rpc: Callable[..., list[Any]]) -> None:
        graphs = full_graphs.outlook_of(self._vllm_config, self._options, collective_rpc)
        if graphs.reason is None:
            logger.info("sgl-vllm: %d full CUDA graphs for passes with jumps", graphs.num_graphs)
        elif graphs.reason != BY_OPTION:
            logger.info("sgl-vllm: passes with jumps leave full CUDA graphs: %s", graphs.reason)

    def check_before_serving(self, engine: EngineCore) -> None:
        """Check the parts on this device, if that is planned. To be called last.

        Raises:
            DeviceLost: afterwards the engine cannot run a request.
        """
        if not self._parts.plan.runs:
            return
        from sgl_vllm.self_check.check import check_engine

        self.checked = check_engine(engine, self._parts)
        self._steps.forward_passes = 0
        self._bitmasks.masked_steps, self._bitmasks.mask_s = 0, 0.0
        log_states(self._parts)

    def round_hits(self) -> None:
        """Make `round_hit` take effect if the frontend does not have the plugin's routes."""
        has_no_routes = ROUNDS_KEY in (self._vllm_config.additional_config or {})
        self._rounds_hits = has_no_routes and not self._options.tells_exactly

    def time_steps(self, engine: EngineCore) -> None:
        """From now on, time all parts of the engine's steps."""
        self.timer.begin()
        self.timer.time_executor(engine.model_executor)

    def block_hasher(self, stock: BlockHasher | None) -> BlockHasher | None:
        """The hasher for the blocks of new requests, instead of vLLM's `stock` hasher."""
        radix = self._parts.radix
        return stock if stock is None or radix is None else radix.block_hasher(stock)


def _adapter(lora_name: str | None, lora_path: str | None) -> tuple[str, str] | None:
    """The adapter of a `CacheNamespace`; None for the base model."""
    return (lora_name, lora_path or "") if lora_name else None
