"""When jump-forward is off: in an engine, for one request, and for one run of forced tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor

from sgl_vllm.fsm.vllm.part import why_no_backend
from sgl_vllm.jump.connectors import unfit
from sgl_vllm.jump.processors import custom_processors, why_no_jumps
from sgl_vllm.part import EngineView, Part, returns_routed_experts
from sgl_vllm.speculation import refusal

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def _unsupported(engine: EngineView) -> str | None:
    scheduler, vllm_config = engine.scheduler, engine.vllm_config
    if engine.options.jump_mode == "canonical" and (reason := why_no_backend(vllm_config)):
        return reason
    if (reason := refusal(vllm_config)) is not None:
        return reason
    if reason := why_no_jumps(vllm_config.model_config):
        return reason
    if scheduler.return_sampling_mask:
        return "sampling masks are returned for every token"
    if returns_routed_experts(vllm_config):
        return "routed experts are returned, and vLLM asks for those of the last token of a step"
    if name := unfit(scheduler.connectors):
        return f"it is not known whether {name} takes jumped requests for new ones"
    if scheduler.use_pp and scheduler.use_v2_model_runner and engine.options.self_check != "on":
        return (
            "with pipeline parallelism and the V2 model runner it has never run "
            "(self_check=on tries it here)"
        )
    return None


PART = Part("jump_forward", _unsupported)


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of an engine that decide which of its requests jump.

    Attributes:
        has_logprobs: whether it returns log-probabilities, not logits.
        drops_after_stop: whether vLLM's frontend, which looks for stop strings, drops the tokens
            that the engine has sent together with the last one of a stop string (from 0.32 on).
        tells_output_from_prompt: whether the output of a resumed request is still output for its
            sampling. For the V2 runner it is; the V1 runner treats it as part of the prompt.
        takes_images: whether a request with images can be resumed.
        greedy_only: whether there are custom logits processors (`processors.py`).
    """

    has_logprobs: bool = True
    drops_after_stop: bool = True
    tells_output_from_prompt: bool = True
    takes_images: bool = True
    greedy_only: bool = False


def limits_of(scheduler: Scheduler) -> Limits:
    """Those of an engine, from the configuration of its scheduler."""
    model_config = scheduler.vllm_config.model_config
    return Limits(
        has_logprobs=model_config.logprobs_mode in ("raw_logprobs", "processed_logprobs"),
        drops_after_stop=hasattr(OutputProcessor, "_trim_surplus_tokens"),
        tells_output_from_prompt=scheduler.use_v2_model_runner,
        takes_images=_takes_images(model_config),
        greedy_only=bool(custom_processors(model_config)),
    )


def _takes_images(model_config: ModelConfig) -> bool:
    """Whether a resumed request computes the same after its images as one that was not resumed.

    Not if each resumption reads the image's data from shared memory once more, which vLLM counts;
    nor if positions depend on which parts of a video were pruned, which they no longer do when they
    are computed again; nor if there is an encoder beside the decoder.
    """
    multimodal = model_config.multimodal_config
    return not model_config.is_encoder_decoder and not (
        multimodal is not None
        and (
            multimodal.mm_processor_cache_type == "shm"
            or multimodal.is_multimodal_pruning_enabled()
        )
    )


def may_jump(request: Request, limits: Limits) -> bool:
    """Whether jumping leaves the output of `request` exactly as it would be without.

    Parameters that change some tokens only do not matter here: `refused.py` handles these.
    """
    params = request.sampling_params
    if params is None or not request.use_structured_output:
        return False
    is_sampled = params.temperature > 0
    return not (
        request.resumable
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or (request.mm_features and not (limits.takes_images and _has_no_embeds(request)))
        or (params.num_logprobs is not None and not limits.has_logprobs)
        or (params.stop and not limits.drops_after_stop)
        or (is_sampled and limits.greedy_only)
        or (not limits.tells_output_from_prompt and _reads_output(params))
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


def _has_no_embeds(request: Request) -> bool:
    return request.prompt_is_token_ids is None and all(
        feature.modality != "prompt_embeds" for feature in request.mm_features
    )


def _reads_output(params: SamplingParams) -> bool:
    """Whether sampling looks at the output alone, or at how many tokens have been sampled.

    With a seed, the V1 runner draws from a generator that each sampled token advances and forced
    tokens do not. The V2 runner's random numbers depend on the position.
    """
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or any(len(word) > 1 for word in params.bad_words_token_ids or ())
        or (params.seed is not None and params.temperature > 0)
    )


SENT_PER_PASS = 65_536
"""A jumped request is sent to the worker whole, which takes 3 ms for 32,000 tokens. So many tokens
take as long as a decoding pass: 6 ms for 8 billion weights on an H100."""


SLOWER_PASSES = 1
"""How many decoding passes a pass with a jump takes longer. Measured with 7 billion weights on an
H200, 16 requests at a time: 12.8 ms instead of 6.2 ms, because it leaves full CUDA graphs."""


def least_run(num_tokens: int, *, has_step_in_flight: bool) -> int:
    """How many forced tokens are worth a jump. Each saves a pass, but for the one that the step in
    flight would decode. Shorter runs are decoded (`short_runs.py`).

    With synchronous scheduling any run is worth a jump: on a CPU no pass is slower for it.

    Args:
        num_tokens: prompt and output of the request.
    """
    beside_step = 1 + SLOWER_PASSES if has_step_in_flight else 0
    return 1 + beside_step + num_tokens // SENT_PER_PASS


WORTH_WAITING = 0.25
"""How likely it must be that a pass would be stale for it to wait. A needless wait costs 2 to 3 ms;
a stale pass costs 6 ms with 8 billion weights on an H100, and more with larger models."""
