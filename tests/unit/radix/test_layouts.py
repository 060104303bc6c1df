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

from sgl_vllm.radix.layouts import keep_layer_specs, layer_specs
from sgl_vllm.radix.part import unsupported_reason

BLOCK_SIZE = 64
SIZES: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {**SIZES, "head_size": 576}

FULL = FullAttentionSpec(**SIZES, head_size=128)
MLA = MLAAttentionSpec(**LATENT)
INDEX = MLAAttentionSpec(**SIZES, head_size=128, cache_role=SparseCacheRole.INDEXER)
WINDOW = SlidingWindowSpec(**SIZES, head_size=128, sliding_window=128)
CHUNK = ChunkedLocalAttentionSpec(**SIZES, head_size=128, attention_chunk_size=64)


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


MAX_MODEL_LEN = 8192


def reason(config: KVCacheConfig, **more: Any) -> str | None:
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_match_unit=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
        model_config=SimpleNamespace(
            is_hybrid=False, is_attention_free=False, max_model_len=MAX_MODEL_LEN
        ),
        kv_transfer_config=None,
        kv_events_config=None,
    )
    vars(vllm_config).update(more)
    return unsupported_reason(vllm_config, config)


SERVED = {
    "full attention": [FULL, FULL],
    "a window that vLLM keeps in full (--disable-hybrid-kv-cache-manager)": [
        FullAttentionSpec(**SIZES, head_size=128, sliding_window=128)
    ],
    "FP8 keys and values": [FullAttentionSpec(**{**SIZES, "dtype": torch.uint8}, head_size=128)],
    "layers with heads of several sizes": [FULL, FullAttentionSpec(**SIZES, head_size=256)],
    "MLA: DeepSeek V2, V3, Kimi K2": [MLA, MLA],
    "MLA in a format of its own (fp8_ds_mla)": [
        MLAAttentionSpec(**LATENT, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)
    ],
    "MLA with an index: DeepSeek V3.2, GLM-5": [MLA, INDEX],
    "full attention with an index: MiniMax M3": [FULL, INDEX],
    "MLA with a drafter of full attention": [MLA, FULL],
    "windows as long as the longest request": [replace(WINDOW, sliding_window=MAX_MODEL_LEN)],
    "windows longer than the longest request: Phi-4-mini": [
        replace(WINDOW, sliding_window=2 * MAX_MODEL_LEN),
        replace(WINDOW, sliding_window=2 * MAX_MODEL_LEN, head_size=256),
    ],
}


@pytest.mark.parametrize("layers", SERVED.values(), ids=SERVED)
def test_layers_that_keep_one_state_for_each_token_are_served(layers):
    assert reason(scheduler_config(worker_config(layers))) is None


MAMBA = MambaSpec(
    block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "sliding window": (WINDOW, "SlidingWindowSpec layers keep only the last tokens of a request"),
    "sliding window, a token shorter than the longest request": (
        replace(WINDOW, sliding_window=MAX_MODEL_LEN - 1),
        "SlidingWindowSpec layers keep only the last tokens of a request",
    ),
    "sliding window, MLA": (
        SlidingWindowMLASpec(**LATENT, sliding_window=128),
        "SlidingWindowMLASpec layers keep only the last tokens of a request",
    ),
    "chunked": (
        ChunkedLocalAttentionSpec(**SIZES, head_size=128, attention_chunk_size=128),
        "ChunkedLocalAttentionSpec layers keep only the last chunk of a request",
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
    assert reason(scheduler_config(worker_config([spec, spec]))) == why


@pytest.mark.parametrize(("spec", "why"), REFUSED.values(), ids=REFUSED)
def test_a_layer_is_seen_behind_another_kind_in_its_group(spec, why):
    """vLLM's scheduler gets the first layer's spec."""
    worker = worker_config([FULL, spec])
    assert reason(scheduler_config(worker)) == why
    assert generate_scheduler_kv_cache_config([worker]).kv_cache_groups[0].kv_cache_spec == FULL
    assert reason(worker) == why


def test_a_layer_is_seen_on_another_stage_of_a_pipeline():
    config = scheduler_config(worker_config([FULL]), worker_config([MLA, INDEX]))
    assert [[*specs] for specs in layer_specs(config)] == [[FULL, MLA, INDEX]]
    spec, why = REFUSED["R-SWA"]
    assert reason(scheduler_config(worker_config([FULL]), worker_config([spec]))) == why


def test_windows_and_chunks_are_served_beside_full_attention():
    assert reason(scheduler_config(worker_config([FULL], [WINDOW], [CHUNK]))) is None
    assert reason(scheduler_config(worker_config([WINDOW], [FULL, FULL]))) is None


def test_recurrent_layers_are_served_beside_full_attention():
    assert reason(scheduler_config(worker_config([FULL], [MAMBA], [MAMBA]))) is None
    assert reason(scheduler_config(worker_config([MAMBA], [FULL], [WINDOW]))) is None


def test_mla_is_served_as_full_attention_beside_other_groups():
    assert reason(scheduler_config(worker_config([MAMBA], [MAMBA], [MLA]))) is None
    assert reason(scheduler_config(worker_config([MLA, INDEX], [WINDOW], [FULL]))) is None


def test_a_window_that_never_ends_is_served_as_full_attention_beside_other_groups():
    endless = replace(WINDOW, sliding_window=MAX_MODEL_LEN)
    assert reason(scheduler_config(worker_config([WINDOW], [endless]))) is None
    assert reason(scheduler_config(worker_config([MAMBA], [endless]))) is None


HYBRID = SimpleNamespace(is_hybrid=True, is_attention_free=False, max_model_len=MAX_MODEL_LEN)


def test_drafts_are_served_beside_windows_but_not_beside_recurrent_layers():
    drafts = {
        "speculative_config": SimpleNamespace(method="ngram"),
        "num_prefill_lookahead_tokens": 0,
    }
    windows = scheduler_config(worker_config([FULL], [WINDOW], [CHUNK]))
    assert reason(windows, **drafts) is None
    drafts["speculative_config"] = SimpleNamespace(method="draft_model")
    assert reason(scheduler_config(worker_config([FULL, FULL])), **drafts) is None
    assert reason(windows, **drafts) == (
        "speculative decoding with draft_model and several KV-cache groups: "
        "vLLM's V1 runner gives a draft model the first group's blocks"
    )
    drafts["speculative_config"] = SimpleNamespace(method="ngram")
    recurrent = scheduler_config(worker_config([FULL], [WINDOW], [MAMBA]))
    assert reason(recurrent, model_config=HYBRID, **drafts) == (
        "speculative decoding with ngram: "
        "a recurrent layer cannot take back accepted tokens that a jump replaces"
    )


def test_events_are_served_with_all_groups_and_connectors_not_with_recurrent_layers():
    several = scheduler_config(worker_config([FULL], [WINDOW]))
    events = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}
    assert reason(several, **events) is None
    recurrent = scheduler_config(worker_config([MAMBA], [FULL]))
    assert reason(recurrent, model_config=HYBRID) is None
    assert reason(recurrent, model_config=HYBRID, **events) is None
    connector = {"kv_transfer_config": SimpleNamespace()}
    assert reason(scheduler_config(worker_config([FULL, FULL])), **connector) is None
    assert reason(several, **connector) is None
    why = "with recurrent layers, a KV connector would have to store and load their states"
    assert reason(recurrent, model_config=HYBRID, **connector) == why


@pytest.mark.parametrize("name", [name for name in REFUSED if name.startswith("recurrent, ")])
def test_recurrent_layers_are_served_in_one_mode_only(name):
    spec, why = REFUSED[name]
    assert reason(scheduler_config(worker_config([FULL], [spec]))) == why


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[MAMBA], [MAMBA]], "none of the model's KV-cache groups is full attention"),
        ([[MAMBA], [WINDOW]], "none of the model's KV-cache groups is full attention"),
        (
            [[MLA], [SlidingWindowMLASpec(**LATENT, sliding_window=2 * MAX_MODEL_LEN)]],
            "SlidingWindowMLASpec layers keep only the last tokens of a request",
        ),
        ([[WINDOW], [WINDOW]], "none of the model's KV-cache groups is full attention"),
        (
            [[FULL], [FULL, WINDOW]],
            "one of the model's KV-cache groups has layers of several kinds",
        ),
    ],
)
def test_other_groups_are_refused(groups, why):
    assert reason(scheduler_config(worker_config(*groups))) == why


def test_windows_may_have_smaller_blocks_than_full_attention():
    full = replace(FULL, block_size=2 * BLOCK_SIZE)
    assert reason(scheduler_config(worker_config([WINDOW], [full], [WINDOW, WINDOW]))) is None
    assert reason(scheduler_config(worker_config([full], [FULL], [WINDOW], [MAMBA]))) == (
        "MambaSpec layers have blocks of another size than full attention"
    )
    assert reason(scheduler_config(worker_config([full], [CHUNK]))) == (
        "ChunkedLocalAttentionSpec layers have blocks of another size than full attention"
    )


@pytest.mark.parametrize("block_size", [2 * BLOCK_SIZE, BLOCK_SIZE // 2 * 3])
def test_blocks_that_do_not_fit_into_those_of_full_attention_are_refused(block_size):
    window = replace(WINDOW, block_size=block_size)
    why = "a block of full attention is not a whole number of a window group's blocks"
    assert reason(scheduler_config(worker_config([FULL], [window]))) == why


@pytest.mark.parametrize("name", [name for name in REFUSED if "V4" in name or "HiSparse" in name])
def test_what_no_number_of_groups_can_have_is_named_before_their_number(name):
    spec, why = REFUSED[name]
    assert reason(scheduler_config(worker_config([WINDOW], [FULL, spec]))) == why


def test_a_model_without_a_kv_cache_is_refused():
    assert reason(worker_config()) == "the model has no KV cache"
