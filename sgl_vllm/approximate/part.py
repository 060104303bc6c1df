"""When approximate reuse is off: in an engine, and for one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.radix.part import layer_specs
from sgl_vllm.vllm_api.probe import missing_hooks

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.part import EngineView

OPTION = "approximate_reuse"


def why_off(engine: EngineView) -> str | None:
    """Why the KV of a segment cannot be moved in this engine; None if it can, as far as is known
    before its workers are asked (`copies.use_in_worker`)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = engine.vllm_config
    if missing := missing_hooks(OPTION):
        return f"this vLLM lacks {', '.join(missing)}"
    if "radix" in engine.off:
        return f"radix is off ({engine.off['radix']})"
    if (device := config.device_config.device_type) not in ("cpu", "cuda"):
        return f"it is not known to work on {device}"
    if config.parallel_config.world_size > 1:
        return "the model is split over several workers"
    if config.parallel_config.use_ubatching:
        return "a pass is split into two that overlap, and rows have to read each other's KV"
    if config.speculative_config is not None:
        return "a drafter has KV of its own"
    if engine.scheduler.has_connector:
        return "a KV connector would store what is not exact"
    if not config.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    if config.model_config.skip_tokenizer_init:
        return "the server has no tokenizer (--skip-tokenizer-init)"
    if config.model_config.uses_mrope:
        return "positions have several dimensions (M-RoPE)"
    if len(engine.kv_cache_config.kv_cache_groups) > 1:
        return "the model has several KV-cache groups"
    for spec in (spec for group in layer_specs(engine.kv_cache_config) for spec in group):
        if type(spec) is not FullAttentionSpec:
            return f"it does not know the KV of {type(spec).__name__} layers"
        if spec.sliding_window is not None or spec.attention_chunk_size is not None:
            return "layers read a window of the tokens before"
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"):
        return f"the KV cache is quantized ({config.cache_config.cache_dtype})"
    return None


def why_exact(request: Request) -> str | None:
    """Why a request that asks for approximate reuse computes exactly; None if it may reuse."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt is not made of tokens, or it generates none"
    if request.mm_features:
        return "it has images or other media"
    if params.prompt_logprobs is not None:
        return "it asks for log-probabilities of its prompt, which have to be computed"
    if request.skip_reading_prefix_cache or request.resumable:
        return "it does not read the prefix cache"
    return None
