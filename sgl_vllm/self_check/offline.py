"""A longer check, in an engine of its own in this process: what `sgl-vllm verify` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sgl_vllm.self_check.report import CheckReport


def verify(model: str, flags: Sequence[str], rounds: int) -> CheckReport:
    """Start an engine as `vllm serve MODEL FLAGS --plugin sgl_vllm` would, and check it. If all
    agrees, a check that an engine did not survive is forgotten.

    Raises:
        Refused: vLLM makes no configuration of these flags, or there is no such model.
        Exception: the engine does not start, or does not survive the check.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.v1.engine.llm_engine import LLMEngine

    from sgl_vllm.config import CONFIG_KEY, Options
    from sgl_vllm.preview.resolve import resolve
    from sgl_vllm.scheduler.scheduler import SglSchedulerMixin
    from sgl_vllm.self_check.driver import StepLimits
    from sgl_vllm.self_check.plan import marker_for, why_impossible
    from sgl_vllm.self_check.runner import check_engine

    config = resolve(model, [*flags, "--plugin-config", "self_check=off"])
    engine = LLMEngine.from_vllm_config(config)
    try:
        core = engine.engine_core.engine_core
        scheduler = core.scheduler
        assert isinstance(scheduler, SglSchedulerMixin)
        facts = scheduler.parts.engine.scheduler
        if reason := why_impossible(facts):
            return CheckReport(error=reason, states=scheduler.parts.states())
        limits = StepLimits(all_s=float("inf"))
        report = check_engine(core, scheduler.parts, rounds=rounds, limits=limits)
        if report.agrees:
            options = (core.vllm_config.additional_config or {}).get(CONFIG_KEY, {})
            marker_for(facts, Options.from_mapping(options)).forget()
        return report
    finally:
        engine.engine_core.shutdown()
