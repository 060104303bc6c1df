"""When jump-forward is off: in an engine, for a request, for a run of forced tokens."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor

from sgl_vllm import jit
from sgl_vllm.fsm.vllm.part import why_no_backend
from sgl_vllm.part import EngineView, Part, returns_routed_experts
from sgl_vllm.speculation import refusal, replays_states
from sgl_vllm.vllm_api.runners import kind_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from sgl_vllm.config import Options


def why_unsupported(vllm_config: VllmConfig, options: Options) -> str | None:
    """Why no request jumps in an engine of this configuration; None if requests do."""
    model_config = vllm_config.model_config
    needs_backend = options.jump_mode == "canonical" or not jit.HAS_NUMBA
    if needs_backend and (reason := why_no_backend(vllm_config)):
        return reason
    if (reason := refusal(vllm_config)) is not None:
        return reason
    if processors := _custom_processors(model_config):
        return f"the logits processor {processors[0]} may change or count tokens"
    if model_config.is_encoder_decoder:
        return "the model has an encoder beside its decoder"
    if model_config.return_sampling_mask:
        return "sampling masks are returned for every token"
    if returns_routed_experts(vllm_config):
        return "routed experts are returned, and vLLM asks for those of the last token of a step"
    if replays_states(vllm_config):
        return "replaying SSM states counts the steps of a request, not its tokens"
    if (
        vllm_config.speculative_config is not None
        and model_config.is_hybrid
        and vllm_config.cache_config.mamba_cache_mode != "align"
    ):
        return "with recurrent layers and drafts, it needs --mamba-cache-mode align"
    runner = kind_of(vllm_config)
    is_pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
    if is_pipeline and not runner.is_proven and options.self_check != "on":
        return (
            f"with pipeline parallelism and the {runner.name} model runner it has never run "
            "(self_check=on tries it here)"
        )
    return None


def _custom_processors(model_config: ModelConfig) -> list[str]:
    """Those of the engine's arguments and of installed packages. vLLM's own are not custom."""
    given = model_config.logits_processors or ()
    names = [one if isinstance(one, str) else one.__qualname__ for one in given]
    return names + [one.value for one in entry_points(group="vllm.logits_processors")]


def _unsupported(engine: EngineView) -> str | None:
    return why_unsupported(engine.vllm_config, engine.options)


PART = Part("jump_forward", _unsupported)


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of an engine that decide which of its requests jump.

    Attributes:
        has_logprobs: whether it returns log-probabilities, not logits.
        drops_after_stop: whether vLLM's frontend, which looks for stop strings, drops the tokens
            that the engine has sent together with the last one of a stop string (from 0.32 on).
        draws_by_position: that of its model runner.
    """

    has_logprobs: bool = True
    drops_after_stop: bool = True
    draws_by_position: bool = True


def limits_of(scheduler: Scheduler) -> Limits:
    """Those of an engine, from the configuration of its scheduler."""
    model_config = scheduler.vllm_config.model_config
    return Limits(
        has_logprobs=model_config.logprobs_mode in ("raw_logprobs", "processed_logprobs"),
        drops_after_stop=hasattr(OutputProcessor, "_trim_surplus_tokens"),
        draws_by_position=kind_of(scheduler).draws_by_position,
    )


def may_jump(request: Request, limits: Limits) -> bool:
    """Whether jumping leaves the output of `request` exactly as it would be without.

    Parameters that change some tokens only do not matter here (`refused.py`).
    """
    params = request.sampling_params
    if params is None or not request.use_structured_output:
        return False
    return not (
        request.resumable
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or (request.mm_features and _has_embeds(request))
        or (params.num_logprobs is not None and not limits.has_logprobs)
        or (params.stop and not limits.drops_after_stop)
        or (params.temperature > 0 and params.seed is not None and not limits.draws_by_position)
    )


def may_open(request: Request, limits: Limits) -> bool:
    """Whether text forced at the start may enter with the prompt.

    Not if the pass that computes both returns scores of the prompt, nor if the output may end
    anywhere (`repetition_detection`).
    """
    params = request.sampling_params
    return may_jump(request, limits) and not (
        params is None
        or params.prompt_logprobs is not None
        or params.prompt_logprob_token_ids is not None
        or params.repetition_detection is not None
    )


def shows_end(params: SamplingParams) -> bool:
    """Whether a stream shows the token that ends it, as text or with its log-probability.

    Stock vLLM sends that token in its own chunk. Clients rely on this: they treat each token of a
    chunk of several as text.
    """
    is_shown = params.num_logprobs is not None or not params.skip_special_tokens
    is_stream = params.output_kind != RequestOutputKind.FINAL_ONLY
    return is_stream and (is_shown or params.include_stop_str_in_output)


def _has_embeds(request: Request) -> bool:
    return request.prompt_is_token_ids is not None or any(
        feature.modality == "prompt_embeds" for feature in request.mm_features
    )


LEAST_RUN = 3
"""How many forced tokens are worth a jump while a step is in flight. Each saves a pass, but for the
first, which that step would decode, and for one: outside full CUDA graphs a pass with a jump takes
twice as long (12.8 instead of 6.2 ms with 7 billion weights on an H200, 16 requests at a time).
Shorter runs are decoded (`short_runs.py`). Without a step in flight any run is worth a jump."""

WORTH_WAITING = 0.25
"""How likely it must be that a pass would be stale for it to wait. A needless wait costs 2 to 3 ms;
a stale pass costs 6 ms with 8 billion weights on an H100, and more with larger models."""
