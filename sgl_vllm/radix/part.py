"""When the radix tree is off: which layouts of the KV cache and configurations it does not serve.

The tree needs three things of a layer:

- what it keeps of a token depends on that token and those before it, and on nothing else;
- it keeps one state per token, so a hit can end at any of them;
- it keeps them for all tokens of a request, until the request ends, or for the last ones
  (`components/windows.py`).

Beside a group that keeps them for all tokens, which a window does that is as long as the longest
request, there may be groups of recurrent layers, which keep one state per request
(`components/states.py`).

Layers of one group share a block table, so they may differ in all else: a block's size in bytes,
keys and values or one latent vector (MLA), an index beside them (DeepSeek V3.2, GLM-5).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Sequence

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from sgl_vllm.part import NO_PREFIX_CACHING, EngineView, Part, returns_routed_experts
from sgl_vllm.speculation import refusal, refusal_beside_groups

# Compared by type, because subclasses of these keep other things: `RSWASpec`, for one.
_SERVED = {FullAttentionSpec, MLAAttentionSpec}
_WINDOWS = {SlidingWindowSpec, ChunkedLocalAttentionSpec}

_REFUSED = {
    "SlidingWindowMLASpec": "keep only the last tokens of a request",
    "RSWASpec": "drop tokens between the prompt and the last ones",
    "MambaSpec": "keep one state per request, not one per token",
    "SinkFullAttentionSpec": "keep attention sinks in blocks that belong to no request",
    "HiddenStateCacheSpec": "keep hidden states by block, for others to read",
    "CrossAttentionSpec": "depend on the encoder's input, not on the tokens before",
}
"""Why, by the name of the kind. All others are refused too."""

_LAYER_SPECS = "_sgl_vllm_layer_specs"
"""Attribute of a scheduler's `KVCacheConfig`: what `layer_specs` returns."""


def unsupported_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the tree cannot serve this model or configuration; None if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return NO_PREFIX_CACHING
    max_model_len = vllm_config.model_config.max_model_len
    if (reason := why_refused(kv_cache_config, max_model_len)) is not None:
        return reason
    specs = itertools.chain.from_iterable(layer_specs(kv_cache_config))
    has_full_attention = any(_keeps_all_tokens(spec, max_model_len) for spec in specs)
    if not has_full_attention and vllm_config.kv_transfer_config is not None:
        return "windows in all layers beside a KV connector, which is not verified"
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
    if (reason := refusal_beside_groups(vllm_config)) is not None:
        return reason
    if not vllm_config.model_config.is_hybrid:
        return None
    if vllm_config.kv_transfer_config is not None:
        return "vLLM's KV connectors know recurrent states at the ends of blocks only"
    if vllm_config.cache_config.prefix_match_unit:
        return (
            "with recurrent layers, prefix_match_unit moves the states that vLLM leaves in blocks"
        )
    return None


def _unsupported(engine: EngineView) -> str | None:
    return unsupported_reason(engine.vllm_config, engine.kv_cache_config)


PART = Part("radix", _unsupported)


# -- the layers of a cache --------------------------------------------------------------------


def keep_layer_specs(config: KVCacheConfig, of_workers: Sequence[KVCacheConfig]) -> None:
    """Keep with a scheduler's configuration what vLLM has left out of it: of all layers of a group,
    vLLM shows its scheduler only the first.

    Args:
        of_workers: the configurations it was made of. All have the same groups, each of the layers
            of one worker.
    """
    vars(config)[_LAYER_SPECS] = [
        [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
        for groups in zip(*(one.kv_cache_groups for one in of_workers), strict=False)
    ]


def layer_specs(config: KVCacheConfig) -> Sequence[Collection[KVCacheSpec]]:
    """For each group the specs of its layers; equal ones may be there once. Without those that
    `keep_layer_specs` keeps, a group is what its own spec says."""
    kept: Sequence[Collection[KVCacheSpec]] | None = vars(config).get(_LAYER_SPECS)
    if kept is not None:
        return kept
    return [iter_layer_specs(group.kv_cache_spec) for group in config.kv_cache_groups]


def why_refused(config: KVCacheConfig, max_model_len: int) -> str | None:
    """Why the tree cannot serve this KV cache, for a log line; None if it can.

    Args:
        max_model_len: tokens of the longest request.
    """
    groups = layer_specs(config)
    if not groups:
        return "the model has no KV cache"
    specs = [spec for group in groups for spec in group]
    for spec in specs:
        if (reason := _missing_property(spec)) is not None:
            return f"{type(spec).__name__} layers {reason}"
    for spec in specs:
        is_beside = len(groups) > 1 and type(spec) is MambaSpec
        if not is_beside and type(spec) not in _SERVED | _WINDOWS:
            name = type(spec).__name__
            return f"{name} layers {_REFUSED.get(name, 'are not known to this version')}"
    keeps_all = {spec: _keeps_all_tokens(spec, max_model_len) for spec in specs}
    if len(groups) == 1 and all(keeps_all.values()):
        return None
    kinds = ({(type(spec), keeps_all[spec] or _reach(spec)) for spec in group} for group in groups)
    if any(len(of_group) > 1 for of_group in kinds):
        return "one of the model's KV-cache groups has layers of several kinds"
    of_groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    full = [
        spec
        for spec, group in zip(of_groups, groups, strict=True)
        if all(map(keeps_all.__getitem__, group))
    ]
    if not full:
        if any(type(spec) is MambaSpec for spec in specs):
            return "none of the model's KV-cache groups is full attention"
        full = of_groups
    return _why_not_of_these_sizes(of_groups, max(full, key=_reach).block_size)


def _keeps_all_tokens(spec: KVCacheSpec, max_model_len: int) -> bool:
    """Of every request. The token at position p reads `[p - sliding_window + 1, p]`, and the last p
    is `max_model_len - 1`."""
    if type(spec) is SlidingWindowSpec:
        return spec.sliding_window >= max_model_len
    return type(spec) in _SERVED


def _reach(spec: KVCacheSpec) -> float:
    """How many tokens up to itself a token reads. The tree takes the group with the most for its
    own (`Groups.main`)."""
    if type(spec) is ChunkedLocalAttentionSpec:
        return 1 + sys.maxsize % spec.attention_chunk_size
    return spec.sliding_window if type(spec) is SlidingWindowSpec else math.inf


def _why_not_of_these_sizes(specs: Sequence[KVCacheSpec], full_size: int) -> str | None:
    """Why groups cannot be served beside full attention of a block size; None if they can."""
    for spec in specs:
        # vLLM's own cache does not serve chunks with blocks of another size either.
        if spec.block_size != full_size and type(spec) not in (
            FullAttentionSpec,
            SlidingWindowSpec,
        ):
            name = type(spec).__name__
            return f"{name} layers have blocks of another size than full attention"
        if full_size % spec.block_size:
            return "a block of full attention is not a whole number of a window group's blocks"
    return None


def _missing_property(spec: KVCacheSpec) -> str | None:
    """Why layers of this kind are refused however many groups there are; None if they are not."""
    if spec.prefix_replay_tokens:
        num_tokens = spec.prefix_replay_tokens
        return f"compute the last {num_tokens} tokens of a hit again (prefix_replay_tokens)"
    if not spec.prefix_cacheable:
        return "keep what requests cannot share (prefix_cacheable is False)"
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        return (
            "do not keep their state where a hit could end "
            f"(mamba_cache_mode is {spec.mamba_cache_mode})"
        )
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1:
        return f"do not keep one state per token (tokens_per_state is {spec.tokens_per_state})"
    return None
