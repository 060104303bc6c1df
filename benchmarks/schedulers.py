"""Makes schedulers as vLLM's engine core makes them, requests, and what a runner gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import sgl_vllm
from benchmarks.engine_settings import MLA, SGL, STOCK, EngineSettings
from sgl_vllm.config import CONFIG_KEY
from sgl_vllm.scheduler.queue import CacheAwareQueue
from sgl_vllm.scheduler.scheduler import SglAsyncScheduler, SglScheduler, SglSchedulerMixin
from sgl_vllm.scheduler.sharing import MIN_SAVED_TOKENS

_MODEL = Path(sgl_vllm.__file__).parent / "demo" / "model"


def make_scheduler(
    arm: str,
    settings: EngineSettings,
    *,
    with_tokenizer: bool = False,
    tokenizer: Path = _MODEL,
    vocab_size: int | None = None,
    structured_outputs_config: StructuredOutputsConfig | None = None,
    kv_transfer_config: KVTransferConfig | None = None,
    **scheduler_args: Any,
) -> Scheduler:
    """A scheduler of vLLM (`arm` "stock") or of the plugin ("sgl"), as the engine core makes it;
    `scheduler_args` are further ones of vLLM's `SchedulerConfig`. Structured output needs a
    tokenizer: the shipped model's, or one in another folder with the `vocab_size` of its model.
    With `kv_transfer_config`, it has the scheduler's side of that KV connector."""
    length = settings.max_model_len
    model_config = ModelConfig(
        model=str(_MODEL),  # its weights play no part
        tokenizer=str(tokenizer),
        skip_tokenizer_init=not with_tokenizer,
        max_model_len=length,
        hf_overrides={
            "max_position_embeddings": length,
            **({} if vocab_size is None else {"vocab_size": vocab_size}),
        },
        enforce_eager=True,
    )
    scheduler_config = SchedulerConfig(
        max_model_len=length,
        is_encoder_decoder=False,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        async_scheduling=settings.async_scheduling,
        **scheduler_args,
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(
            block_size=settings.block_size,
            enable_prefix_caching=True,
            prefix_match_unit=settings.prefix_match_unit,
            mamba_cache_mode="align" if settings.num_recurrent_groups else "none",
        ),
        speculative_config=_speculation(settings, model_config),
        structured_outputs_config=structured_outputs_config or StructuredOutputsConfig(),
        kv_transfer_config=kv_transfer_config,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=settings.kv_events, publisher="null"
        ),
        additional_config={CONFIG_KEY: dict(settings.plugin)} if arm == SGL else {},
    )
    # A CPU as the platform switches it off, but no pass runs here.
    scheduler_config.async_scheduling = settings.async_scheduling
    num_blocks = settings.num_blocks + 1  # vLLM keeps one as the null block
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=_groups(settings),
        # As vLLM resolves it where layers have windows, or are recurrent.
        prefix_cache_retention_interval=(
            0 if settings.sliding_windows or settings.num_recurrent_groups else None
        ),
    )
    scheduler_class: type[Scheduler]
    if arm == STOCK:
        scheduler_class = AsyncScheduler if settings.async_scheduling else Scheduler
    else:
        scheduler_class = SglAsyncScheduler if settings.async_scheduling else SglScheduler
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    if isinstance(scheduler.waiting, CacheAwareQueue) and scheduler.waiting.sharing is not None:
        # The scheduler plays an engine on a GPU.
        scheduler.waiting.sharing.min_saved_tokens = MIN_SAVED_TOKENS
    return scheduler


def _speculation(settings: EngineSettings, model_config: ModelConfig) -> SpeculativeConfig | None:
    """Speculation by the method that the settings name. Nothing drafts here, so its drafter may be
    of another kind."""
    if settings.speculation is None:
        return None
    with_model: dict[str, Any] = {}
    if settings.speculation != "ngram":
        with_model["model"] = str(_MODEL)
    config = SpeculativeConfig(
        method="draft_model" if with_model else "ngram",
        num_speculative_tokens=settings.num_drafts,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
        **with_model,
    )
    config.method = settings.speculation
    config.disable_eagle_block_drop = settings.num_recurrent_groups > 0  # as the plugin sets it
    return config


def _groups(settings: EngineSettings) -> list[KVCacheGroupSpec]:
    """Windows and recurrent layers first, as vLLM numbers the groups of a model that begins so."""
    size, kind = settings.block_size, {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs: list[KVCacheSpec] = [
        SlidingWindowSpec(block_size=size, sliding_window=window, **kind)
        for window in settings.sliding_windows
    ]
    specs += [
        MambaSpec(
            block_size=size,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=settings.num_drafts,
        )
    ] * settings.num_recurrent_groups
    if settings.full_attention is not None:
        full = MLAAttentionSpec if settings.full_attention == MLA else FullAttentionSpec
        specs.append(full(block_size=size * settings.full_block_scale, **kind))
    specs += [
        ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=chunk, **kind)
        for chunk in settings.attention_chunks
    ]
    return [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]


def engine_request(params: SamplingParams | None = None, **fields: Any) -> EngineCoreRequest:
    """A request as vLLM's frontend sends it to an engine, of which the caller says what matters."""
    unset = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    request_id = fields.get("request_id", "a")
    defaults = {
        **dict.fromkeys(unset),
        "request_id": request_id,
        "external_req_id": request_id,
        "arrival_time": 0.0,
        "prompt_token_ids": [*range(100)],
        "sampling_params": params or SamplingParams(),
    }
    return EngineCoreRequest(**{**defaults, **fields})


def runner_output(request_ids: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
    """As a model runner gives it, with the tokens sampled for each request."""
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=sampled,
    )


def make_block_hasher(scheduler: Scheduler) -> Callable[[Request], list[BlockHash]]:
    """The hasher that the engine core gives to every request."""
    hash_function = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(scheduler.hash_block_size, hash_function)
    is_plugin = isinstance(scheduler, SglSchedulerMixin)
    return scheduler.sgl_vllm.block_hasher(hasher) if is_plugin else hasher
