"""Which layouts of the KV cache the tree serves.

Owns the list of vLLM's kinds of layers that the tree serves, why others are refused, and the kinds
of all layers of a group, of which vLLM shows its scheduler only the first. Does not own the other
reasons for which the tree is off (`part.py`).

The tree needs three things of a layer:

- what it keeps of a token depends on that token and those before it, and on nothing else;
- it keeps one state per token, so a hit can end at any of them;
- it keeps them for all tokens of a request, until the request ends.

A window that is as long as the longest request never ends: its layers have all three.

In addition, there may be groups of layers that read a window of these tokens only
(`components/windows.py`), and of recurrent layers, which keep one state per request
(`components/states.py`).

Layers of one group share a block table, so they may differ in all else: a block's size in bytes,
keys and values or one latent vector (MLA), an index beside them (DeepSeek V3.2, GLM-5).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

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

SERVED: frozenset[type[KVCacheSpec]] = frozenset({FullAttentionSpec, MLAAttentionSpec})
"""The kinds of layers that the tree serves in any group. Types, because subclasses of these keep
other things: `RSWASpec`, `SinkFullAttentionSpec`, `HiddenStateCacheSpec`."""

SERVED_BESIDE: frozenset[type[KVCacheSpec]] = frozenset(
    {SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec}
)
"""The kinds of layers that the tree serves beside a group that keeps all tokens."""

_REFUSED = {
    "SlidingWindowSpec": "keep only the last tokens of a request",
    "SlidingWindowMLASpec": "keep only the last tokens of a request",
    "ChunkedLocalAttentionSpec": "keep only the last chunk of a request",
    "RSWASpec": "drop tokens between the prompt and the last ones",
    "MambaSpec": "keep one state per request, not one per token",
    "SinkFullAttentionSpec": "keep attention sinks in blocks that belong to no request",
    "HiddenStateCacheSpec": "keep hidden states by block, for others to read",
    "CrossAttentionSpec": "depend on the encoder's input, not on the tokens before",
}
"""Why, by the name of the kind. All others are refused too."""

_LAYER_SPECS = "_sgl_vllm_layer_specs"
"""Attribute of a scheduler's `KVCacheConfig`: what `layer_specs` returns."""


def keep_layer_specs(config: KVCacheConfig, of_workers: Sequence[KVCacheConfig]) -> None:
    """Keep with a scheduler's configuration what vLLM has left out of it.

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
        is_beside = len(groups) > 1 and type(spec) in SERVED_BESIDE
        if not is_beside and not _keeps_all_tokens(spec, max_model_len):
            name = type(spec).__name__
            return f"{name} layers {_REFUSED.get(name, 'are not known to this version')}"
    return _why_not_together(config, groups, max_model_len) if len(groups) > 1 else None


def _why_not_together(
    config: KVCacheConfig, groups: Sequence[Collection[KVCacheSpec]], max_model_len: int
) -> str | None:
    """Why groups of served kinds cannot be served together; None if they can."""
    if any(len({type(spec) for spec in group}) > 1 for group in groups):
        return "one of the model's KV-cache groups has layers of several kinds"
    keep_all = [all(_keeps_all_tokens(spec, max_model_len) for spec in group) for group in groups]
    if not any(keep_all):
        return "none of the model's KV-cache groups is full attention"
    return _why_not_of_these_sizes(
        [group.kv_cache_spec for group in config.kv_cache_groups], keep_all
    )


def _why_not_of_these_sizes(specs: Sequence[KVCacheSpec], keep_all: Sequence[bool]) -> str | None:
    """Why groups cannot be served with blocks of their sizes; None if they can. `keep_all` says
    which of them keep all tokens of a request."""
    # The group that the tree takes for its own (`Groups.full`).
    full = max((spec for spec, keeps in zip(specs, keep_all, strict=True) if keeps), key=_reach)
    for spec in specs:
        # vLLM's own cache does not serve chunks with blocks of another size either.
        if spec.block_size != full.block_size and type(spec) not in (
            FullAttentionSpec,
            SlidingWindowSpec,
        ):
            name = type(spec).__name__
            return f"{name} layers have blocks of another size than full attention"
        if full.block_size % spec.block_size:
            return "a block of full attention is not a whole number of a window group's blocks"
    return None


def _reach(spec: KVCacheSpec) -> float:
    """How many tokens up to itself a token reads."""
    return spec.sliding_window if type(spec) is SlidingWindowSpec else math.inf


def _keeps_all_tokens(spec: KVCacheSpec, max_model_len: int) -> bool:
    """Whether layers of this kind read, and so keep, all tokens of every request. The token at
    position p reads `[p - sliding_window + 1, p]`, and the last p is `max_model_len - 1`."""
    if type(spec) is SlidingWindowSpec:
        return spec.sliding_window >= max_model_len
    return type(spec) in SERVED


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
