"""Whether an engine is checked before it serves, and which parts are off if it is not.

Owns the rules. Does not own the check (`check.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.platforms import current_platform

from sgl_vllm import speculation
from sgl_vllm.config import Options
from sgl_vllm.part import SchedulerFacts
from sgl_vllm.self_check.marker import Marker, default_folder
from sgl_vllm.version import __version__
from sgl_vllm.vllm_api.probe import missing_hooks
from sgl_vllm.vllm_api.runners import kind_of
from sgl_vllm.vllm_api.versions import installed_vllm

logger = init_logger("vllm.sgl_vllm.self_check")

CHECKED = ("radix", "fsm", "jump_forward", "select")
"""The parts that a check covers, in its order. `schedule` changes the order of requests only."""

NEED_CHECK = ("jump_forward", "select")
"""The parts that are off where a check is needed and cannot run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one engine is checked.

    Attributes:
        runs: the engine is checked when it has started.
        off: why parts are off without a check.
    """

    runs: bool = False
    off: Mapping[str, str] = field(default_factory=dict)


def plan_for(scheduler: SchedulerFacts, options: Options) -> Plan:
    """The plan for an engine with such a scheduler. Only reads a folder. Never raises."""
    try:
        return _plan_for(scheduler, options)
    except Exception as error:
        logger.exception("sgl-vllm: the self-check cannot be planned. Please report this")
        return Plan(off=dict.fromkeys(NEED_CHECK, f"the self-check cannot be planned: {error}"))


def _plan_for(scheduler: SchedulerFacts, options: Options) -> Plan:
    config, wanted = scheduler.vllm_config, options.self_check
    runner = kind_of(config)
    is_proven = runner.is_proven and not _is_async(scheduler) and speculation.is_tested(config)
    on_cpu = config.device_config.device_type == "cpu"
    if wanted == "off" or (wanted == "auto" and on_cpu and is_proven):
        return Plan()
    if (reason := why_impossible(scheduler)) is not None:
        how = f"vLLM's {runner.name} model runner, and not checked here: {reason}"
        off = f"not verified on a GPU with {how}"
        return Plan(off={} if is_proven else dict.fromkeys(NEED_CHECK, off))
    if wanted == "auto" and (abandoned := marker_for(scheduler, options).abandoned()):
        off = (
            "the engine died during its last self-check here; to try again, delete "
            f"{abandoned[0]} or set self_check=on"
        )
        return Plan(off=dict.fromkeys(CHECKED, off))
    return Plan(runs=True)


def why_impossible(scheduler: SchedulerFacts) -> str | None:
    """Why canaries cannot run in an engine; None if they can."""
    config = scheduler.vllm_config
    if missing := missing_hooks("self_check"):
        return f"this vLLM lacks {', '.join(missing)}"
    if config.model_config.runner_type != "generate":
        return "the model does not generate text"
    if config.model_config.is_encoder_decoder or config.model_config.is_diffusion:
        return "the model does not decode token by token from a text"
    if config.parallel_config.data_parallel_size > 1:
        return "data-parallel ranks of this model step together"
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        return "each rank has a scheduler of its own"
    return None


def marker_for(scheduler: SchedulerFacts, options: Options) -> Marker:
    """The marker of this model, device, configuration and these versions."""
    return Marker(default_folder(), facts_of(scheduler, options))


def facts_of(scheduler: SchedulerFacts, options: Options) -> dict[str, object]:
    """What an engine is: what the result of a check may depend on."""
    config = scheduler.vllm_config
    model, parallel, vllm = config.model_config, config.parallel_config, installed_vllm()
    device = config.device_config.device_type
    if device != "cpu":
        try:
            device = current_platform.get_device_name()
        except Exception:  # a driver without the library that is asked
            device = "unknown"
    return {
        "sgl_vllm": __version__,
        "vllm": vllm.version if vllm else "unknown",
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "device": device,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_index": parallel.data_parallel_index,
        "block_size": scheduler.block_size,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "model_runner": kind_of(config).name,
        "async_scheduling": _is_async(scheduler),
        "speculation": speculation.facts_of(config),
        "options": {k: v for k, v in options.to_mapping().items() if k != "self_check"},
    }


def _is_async(scheduler: SchedulerFacts) -> bool:
    return bool(scheduler.vllm_config.scheduler_config.async_scheduling)
