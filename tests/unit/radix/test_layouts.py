"""Which layouts of the KV cache the tree serves, and what is said of the others.

The specs are vLLM's own, and so are their groups and what of these reaches a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from sgl_vllm.radix.part import keep_layer_specs, layer_specs, unsupported_reason

BLOCK_SIZE = 64
MAX_MODEL_LEN = 8192
SIZES: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {**SIZES, "head_size": 576}

FULL = FullAttentionSpec(**SIZES, head_size=128)
MLA = MLAAttentionSpec(**LATENT)
INDEX = MLAAttentionSpec(**SIZES, head_size=128, cache_role=SparseCacheRole.INDEXER)
WINDOW = SlidingWindowSpec(**SIZES, head_size=128, sliding_window=128)
ENDLESS = replace(WINDOW, sliding_window=MAX_MODEL_LEN)
NEARLY_ENDLESS = replace(WINDOW, sliding_window=MAX_MODEL_LEN - 1)
CHUNK = ChunkedLocalAttentionSpec(**SIZES, head_size=128, attention_chunk_size=64)
MAMBA = MambaSpec(
    block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
LARGE = replace(FULL, block_size=2 * BLOCK_SIZE)


class MadeUpSpec(FullAttentionSpec):
    """A kind of layers that an out-of-tree platform has registered."""


def worker_config(*groups: Sequence[KVCacheSpec]) -> KVCacheConfig:
    """Of a worker with these layers in each group, as vLLM forms one of layers that are not all the
    same."""
    specs = []
    for number, layers in enumerate(groups):
        by_name = {f"{number}.{layer}": spec for layer, spec in enumerate(layers)}
        spec: KVCacheSpec = layers[0]
        if any(other != spec for other in layers):
            spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=by_name)
        specs.append(KVCacheGroupSpec(list(by_name), spec))
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=specs)


def scheduler_config(*of_workers: KVCacheConfig) -> KVCacheConfig:
    """What the scheduler of an engine with these workers gets."""
    config = generate_scheduler_kv_cache_config(list(of_workers))
    keep_layer_specs(config, of_workers)
    return config


def reason(config: KVCacheConfig, *, is_hybrid: bool = False, **more: Any) -> str | None:
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_match_unit=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
        model_config=SimpleNamespace(
            is_hybrid=is_hybrid, is_attention_free=False, max_model_len=MAX_MODEL_LEN
        ),
        kv_transfer_config=None,
        kv_events_config=None,
    )
    vars(vllm_config).update(more)
    return unsupported_reason(vllm_config, config)


def of_groups(*groups: Sequence[KVCacheSpec], **more: Any) -> str | None:
    return reason(scheduler_config(worker_config(*groups)), **more)


SERVED = {
    "full attention": [[FULL, FULL]],
    "a window that vLLM keeps in full (--disable-hybrid-kv-cache-manager)": [
        [FullAttentionSpec(**SIZES, head_size=128, sliding_window=128)]
    ],
    "FP8 keys and values": [[FullAttentionSpec(**{**SIZES, "dtype": torch.uint8}, head_size=128)]],
    "layers with heads of several sizes": [[FULL, FullAttentionSpec(**SIZES, head_size=256)]],
    "MLA: DeepSeek V2, V3, Kimi K2": [[MLA, MLA]],
    "MLA in a format of its own (fp8_ds_mla)": [
        [MLAAttentionSpec(**LATENT, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)]
    ],
    "MLA with an index: DeepSeek V3.2, GLM-5": [[MLA, INDEX]],
    "full attention with an index: MiniMax M3": [[FULL, INDEX]],
    "MLA with a drafter of full attention": [[MLA, FULL]],
    "windows as long as the longest request": [[ENDLESS]],
    "windows longer than the longest request: Phi-4-mini": [
        [replace(WINDOW, sliding_window=2 * MAX_MODEL_LEN, head_size=size) for size in (128, 256)]
    ],
    "windows and chunks beside full attention": [[FULL], [WINDOW], [CHUNK]],
    "full attention behind windows": [[WINDOW], [FULL, FULL]],
    "recurrent layers beside full attention": [[FULL], [MAMBA], [MAMBA]],
    "all kinds": [[MAMBA], [FULL], [WINDOW]],
    "MLA beside recurrent layers": [[MAMBA], [MAMBA], [MLA]],
    "MLA, windows and full attention": [[MLA, INDEX], [WINDOW], [FULL]],
    "an endless window as full attention": [[WINDOW], [ENDLESS]],
    "an endless window beside recurrent layers": [[MAMBA], [ENDLESS]],
    "windows with smaller blocks than full attention": [[WINDOW], [LARGE], [WINDOW, WINDOW]],
    "windows alone: Mistral 7B v0.1": [[WINDOW, replace(WINDOW, head_size=256)]],
    "a window a token shorter than the longest request": [[NEARLY_ENDLESS]],
    "windows of two lengths, and chunks": [[WINDOW], [NEARLY_ENDLESS], [CHUNK]],
    "chunks alone": [[CHUNK]],
}


@pytest.mark.parametrize("groups", SERVED.values(), ids=SERVED)
def test_layers_that_keep_one_state_for_each_token_are_served_and_others_beside_them(groups):
    assert of_groups(*groups) is None


LAST = "keep only the last tokens of a request"
REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "sliding window, MLA": (
        SlidingWindowMLASpec(**LATENT, sliding_window=128),
        f"SlidingWindowMLASpec layers {LAST}",
    ),
    "recurrent": (MAMBA, "MambaSpec layers keep one state per request, not one per token"),
    "recurrent, with a state at the end of a request only": (
        replace(MAMBA, mamba_cache_mode="none"),
        "MambaSpec layers do not keep their state where a hit could end (mamba_cache_mode is none)",
    ),
    "recurrent, with a state in every block": (
        replace(MAMBA, mamba_cache_mode="all"),
        "MambaSpec layers do not keep their state where a hit could end (mamba_cache_mode is all)",
    ),
    "R-SWA": (
        RSWASpec(**SIZES, head_size=128, rswa_window=128),
        "RSWASpec layers drop tokens between the prompt and the last ones",
    ),
    "sinks": (
        SinkFullAttentionSpec(**SIZES, head_size=128, sink_len=BLOCK_SIZE),
        "SinkFullAttentionSpec layers keep attention sinks in blocks that belong to no request",
    ),
    "hidden states": (
        HiddenStateCacheSpec(**LATENT),
        "HiddenStateCacheSpec layers keep hidden states by block, for others to read",
    ),
    "cross attention": (
        CrossAttentionSpec(**SIZES, head_size=128),
        "CrossAttentionSpec layers depend on the encoder's input, not on the tokens before",
    ),
    "a subclass that this version does not know": (
        MadeUpSpec(**SIZES, head_size=128),
        "MadeUpSpec layers are not known to this version",
    ),
    "several tokens in one state: DeepSeek V4": (
        MLAAttentionSpec(**LATENT, tokens_per_state=4, model_version="deepseek_v4"),
        "MLAAttentionSpec layers do not keep one state per token (tokens_per_state is 4)",
    ),
    "several states for one token": (
        FullAttentionSpec(**SIZES, head_size=128, tokens_per_state=Fraction(1, 4)),
        "FullAttentionSpec layers do not keep one state per token (tokens_per_state is 1/4)",
    ),
    "replay: DeepSeek V4.1": (
        SlidingWindowMLASpec(**LATENT, sliding_window=128, bounded_replay=True),
        "SlidingWindowMLASpec layers compute the last 128 tokens of a hit again "
        "(prefix_replay_tokens)",
    ),
    "a ring: Qwen 4, GLM-5 Next": (
        CircularBufferSpec(**SIZES, head_size=128),
        "CircularBufferSpec layers keep what requests cannot share (prefix_cacheable is False)",
    ),
    "HiSparse, hot": (
        HiSparseHotSpec(block_size=BLOCK_SIZE, page_size=4096, blocks_per_request=2),
        "HiSparseHotSpec layers keep what requests cannot share (prefix_cacheable is False)",
    ),
    "HiSparse, resident": (
        HiSparseResidentSpec(block_size=BLOCK_SIZE, page_size=4096),
        "HiSparseResidentSpec layers keep what requests cannot share (prefix_cacheable is False)",
    ),
}


@pytest.mark.parametrize(("spec", "why"), REFUSED.values(), ids=REFUSED)
def test_other_layers_are_refused_with_what_they_lack(spec, why):
    """Also behind another kind in their group, of which vLLM's scheduler gets the first layer's
    spec, and on another stage of a pipeline."""
    assert of_groups([spec, spec]) == why
    worker = worker_config([FULL, spec])
    assert reason(scheduler_config(worker)) == reason(worker) == why
    assert generate_scheduler_kv_cache_config([worker]).kv_cache_groups[0].kv_cache_spec == FULL
    assert reason(scheduler_config(worker_config([FULL]), worker_config([spec]))) == why


def test_the_layers_of_all_stages_of_a_pipeline_are_kept():
    config = scheduler_config(worker_config([FULL]), worker_config([MLA, INDEX]))
    assert [[*specs] for specs in layer_specs(config)] == [[FULL, MLA, INDEX]]


NO_FULL = "none of the model's KV-cache groups is full attention"
SEVERAL_KINDS = "one of the model's KV-cache groups has layers of several kinds"
NOT_WHOLE = "a block of full attention is not a whole number of a window group's blocks"
NOT_TOGETHER: dict[str, tuple[list[list[KVCacheSpec]], str]] = {
    "no layer": ([], "the model has no KV cache"),
    "recurrent layers alone": ([[MAMBA], [MAMBA]], NO_FULL),
    "recurrent layers and windows": ([[MAMBA], [WINDOW]], NO_FULL),
    "endless windows of MLA": (
        [[MLA], [SlidingWindowMLASpec(**LATENT, sliding_window=2 * MAX_MODEL_LEN)]],
        f"SlidingWindowMLASpec layers {LAST}",
    ),
    "two kinds in a group": (
        [[FULL], [FULL, WINDOW]],
        SEVERAL_KINDS,
    ),
    "full attention and a window in one group": ([[FULL, WINDOW]], SEVERAL_KINDS),
    "windows of two lengths in one group": ([[WINDOW, NEARLY_ENDLESS]], SEVERAL_KINDS),
    "states of smaller blocks": (
        [[LARGE], [FULL], [WINDOW], [MAMBA]],
        "MambaSpec layers have blocks of another size than full attention",
    ),
    "chunks of smaller blocks": (
        [[LARGE], [CHUNK]],
        "ChunkedLocalAttentionSpec layers have blocks of another size than full attention",
    ),
    "windows of larger blocks": ([[FULL], [replace(WINDOW, block_size=2 * BLOCK_SIZE)]], NOT_WHOLE),
    "windows of odd blocks": (
        [[FULL], [replace(WINDOW, block_size=BLOCK_SIZE // 2 * 3)]],
        NOT_WHOLE,
    ),
    **{
        f"{name}, beside others": ([[FULL], [REFUSED[name][0]]], REFUSED[name][1])
        for name in REFUSED
        if name.startswith("recurrent, ") or "V4" in name or "HiSparse" in name
    },
}


@pytest.mark.parametrize(("groups", "why"), NOT_TOGETHER.values(), ids=NOT_TOGETHER)
def test_groups_that_cannot_be_served_together_are_refused(groups, why):
    assert of_groups(*groups) == why


DRAFTS = {"speculative_config": SimpleNamespace(method="ngram"), "num_prefill_lookahead_tokens": 0}
MODEL = {**DRAFTS, "speculative_config": SimpleNamespace(method="draft_model")}
MODEL["use_v2_model_runner"] = True
EVENTS = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}
NOT_BESIDE_CONNECTOR = "windows in all layers beside a KV connector, which is not verified"
CONNECTOR = {"kv_transfer_config": SimpleNamespace()}


@pytest.mark.parametrize(
    ("groups", "options", "why"),
    [
        ([[FULL], [WINDOW], [CHUNK]], DRAFTS, None),
        ([[FULL, FULL]], MODEL, None),
        (
            [[FULL], [WINDOW], [CHUNK]],
            MODEL,
            "speculative decoding with draft_model and several KV-cache groups: "
            "no test of this project runs it",
        ),
        ([[FULL], [WINDOW], [MAMBA]], DRAFTS, None),
        ([[FULL], [WINDOW]], EVENTS, None),
        ([[MAMBA], [FULL]], EVENTS, None),
        ([[FULL, FULL]], CONNECTOR, None),
        ([[FULL], [WINDOW]], CONNECTOR, None),
        ([[WINDOW], [WINDOW]], DRAFTS, None),
        ([[WINDOW]], CONNECTOR, NOT_BESIDE_CONNECTOR),
        ([[WINDOW], [NEARLY_ENDLESS]], CONNECTOR, NOT_BESIDE_CONNECTOR),
        (
            [[MAMBA], [FULL]],
            CONNECTOR,
            "vLLM's KV connectors know recurrent states at the ends of blocks only",
        ),
    ],
)
def test_what_else_is_served_with_several_groups(groups, options, why):
    assert of_groups(*groups, is_hybrid=[MAMBA] in groups, **options) == why
