"""The check of an engine that serves nothing: what `sgl-vllm verify` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sgl_vllm.self_check.report import CheckReport


def verify(model: str, flags: Sequence[str]) -> CheckReport:
    """Start an engine in this process, as `vllm serve MODEL FLAGS --plugin sgl_vllm` would, and let
    it check itself.

    Raises:
        Refused: vLLM makes no configuration of these flags, or there is no such model.
        Exception: the engine does not start, or does not survive the check.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.v1.engine.llm_engine import LLMEngine

    from sgl_vllm.preview.resolve import resolve
    from sgl_vllm.scheduler.scheduler import SglSchedulerMixin
    from sgl_vllm.self_check.plan import why_impossible

    config = resolve(model, [*flags, "--plugin-config", "self_check=on"])
    engine = LLMEngine.from_vllm_config(config)
    try:
        scheduler = engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, SglSchedulerMixin)
        if report := scheduler.sgl_vllm.checked:
            return report
        reason = why_impossible(scheduler.parts.engine.scheduler) or "it was not planned"
        return CheckReport(error=reason, states=scheduler.parts.states())
    finally:
        engine.engine_core.shutdown()
