"""A longer check, in an engine of its own: what `sgl-vllm verify` runs.

Owns how an engine is started from the flags of `vllm serve`. It runs in this process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from sgl_vllm.self_check.report import CheckReport

logger = logging.getLogger("vllm.sgl_vllm.self_check")

ROUNDS = 5


def verify(model: str, flags: Sequence[str], rounds: int = ROUNDS) -> CheckReport:
    """Start an engine as `vllm serve MODEL FLAGS --plugin sgl_vllm` would, and check it.

    Flags of the API server, such as `--port`, are ignored. If all agrees, a check that an engine
    did not survive is forgotten.

    Raises:
        Refused: vLLM makes no configuration of these flags, or there is no such model.
        Exception: the engine does not start, or does not survive the check.
        SystemExit: a flag has a value that vLLM does not accept.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from sgl_vllm.config import CONFIG_KEY, Options
    from sgl_vllm.flags import PLUGIN_NAME
    from sgl_vllm.plugin import register
    from sgl_vllm.preview.refusal import engine_config
    from sgl_vllm.scheduler.scheduler import SglSchedulerMixin
    from sgl_vllm.self_check.driver import StepLimits
    from sgl_vllm.self_check.plan import marker_for, why_impossible
    from sgl_vllm.self_check.runner import check_engine

    register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments, ignored = parser.parse_known_args(
        ["--plugin", PLUGIN_NAME, "--model", model, *flags, "--plugin-config", "self_check=off"]
    )
    if ignored:
        logger.warning("sgl-vllm: not for the engine, and ignored: %s", " ".join(ignored))
    config = engine_config(EngineArgs, arguments, model)
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
