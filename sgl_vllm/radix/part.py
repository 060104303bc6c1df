"""When the radix tree is off."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from sgl_vllm.part import NO_PREFIX_CACHING, EngineView, Part, returns_routed_experts
from sgl_vllm.radix.layouts import why_refused
from sgl_vllm.speculation import refusal, refusal_beside_groups


def unsupported_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the tree cannot serve this model or configuration; None if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return NO_PREFIX_CACHING
    max_model_len = vllm_config.model_config.max_model_len
    if (reason := why_refused(kv_cache_config, max_model_len)) is not None:
        return reason
    if len(kv_cache_config.kv_cache_groups) > 1 and (
        reason := _why_not_several_groups(vllm_config)
    ):
        return reason
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks over workers"
    if (reason := refusal(vllm_config)) is not None:
        return reason
    if returns_routed_experts(vllm_config):
        return "routed experts are returned, which vLLM keeps by its own block hashes"
    return None


def _why_not_several_groups(vllm_config: VllmConfig) -> str | None:
    """Why the tree cannot serve several KV-cache groups in this configuration; None if it can."""
    if (reason := refusal_beside_groups(vllm_config)) is not None:
        return reason
    if not vllm_config.model_config.is_hybrid:
        return None
    if vllm_config.kv_transfer_config is not None:
        return "with recurrent layers, a KV connector would have to store and load their states"
    if vllm_config.cache_config.prefix_match_unit:
        return (
            "with recurrent layers, prefix_match_unit moves the states that vLLM leaves in blocks"
        )
    return None


def _unsupported(engine: EngineView) -> str | None:
    return unsupported_reason(engine.vllm_config, engine.kv_cache_config)


PART = Part("radix", _unsupported)
