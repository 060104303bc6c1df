"""A part of the plugin, as it says for itself whether it can work in an engine.

Owns the form of that answer and the reasons that parts share. Does not own the reasons of a part,
which are next to its code: `radix/part.py`, `fsm/vllm/part.py`, `jump/part.py`,
`scheduler/queue.py`, `scheduler/select.py`; nor what must be checked first (`self_check/plan.py`).
Imports no vLLM at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_vllm.config import Options
from sgl_vllm.vllm_api.probe import missing_hooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.request_queue import SchedulingPolicy
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

BY_OPTION = "by option"
"""The reason of a part that an option switches off. All other reasons are worth a warning."""

NO_PREFIX_CACHING = (
    "prefix caching is off (by --no-enable-prefix-caching, or by vLLM for this model)"
)


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """All that decides, of a scheduler, whether a part can work: of one that runs, or of one that
    was never made (`preview/engine.py`).
    """

    vllm_config: VllmConfig
    has_connector: bool
    policy: SchedulingPolicy
    block_size: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> SchedulerFacts:
        """Those of vLLM's part of a scheduler, constructed."""
        return cls(
            vllm_config=scheduler.vllm_config,
            has_connector=scheduler.connector is not None,
            policy=scheduler.policy,
            block_size=scheduler.block_size,
        )


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as it is before the parts are built.

    Attributes:
        scheduler: what is known of its scheduler.
        off: the parts that are off, with their reasons, of those that were asked already.
        unchecked: why parts are off because no self-check has seen them here.
    """

    scheduler: SchedulerFacts
    kv_cache_config: KVCacheConfig
    options: Options
    off: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)

    @property
    def vllm_config(self) -> VllmConfig:
        return self.scheduler.vllm_config


@dataclass(frozen=True, slots=True)
class Part:
    """A part that can be switched off by itself.

    Attributes:
        name: its name in logs and statistics, the option that switches it on, and the group of
            hooks in vLLM that it needs (`vllm_api/probe.py`).
        unsupported: why the part cannot work in an engine, for a log line such as "radix off
            (prefix caching is off)". None if it can.
    """

    name: str
    unsupported: Callable[[EngineView], str | None]

    def why_off(self, engine: EngineView) -> str | None:
        """Why the part is off in this engine; None if it is on."""
        if not getattr(engine.options, self.name):
            return BY_OPTION
        if missing := missing_hooks(self.name):
            return f"this vLLM lacks {', '.join(missing)}"
        reason = _why_no_part(engine) or self.unsupported(engine)
        return reason or engine.unchecked.get(self.name)


def _why_no_part(engine: EngineView) -> str | None:
    """Why no part can work in this engine."""
    if engine.vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        # All ranks must schedule the same. Ours may not: limits of time, measured load times.
        return "with external_launcher, each rank has a scheduler of its own"
    return None


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Whether answers name the experts that computed each token."""
    outputs = getattr(vllm_config, "aux_output_config", None)  # vLLM 0.31 has none
    return bool(getattr(outputs, "enable_return_routed_experts", False))
