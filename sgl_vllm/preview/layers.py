"""The KV cache that an engine would have, from its model's layers without their weights.

Owns how the layers are built and handed to vLLM. Does not own how vLLM groups them: that is
`EngineCore`'s own code, which runs here as it runs at a start.

The layers are built on PyTorch's `meta` device, where a tensor has a shape and no memory: two
seconds for 671 billion parameters. They are those of the whole model, not of one rank: how a model
is split over devices changes the sizes of its layers, but not their kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import set_current_vllm_config
from vllm.config.utils import replace
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup
from vllm.v1.worker.workspace import init_workspace_manager

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

AVAILABLE_BYTES = 1 << 50
"""The memory that the KV cache is planned for: enough for any model. None is allocated."""


def kv_cache_config(config: VllmConfig) -> KVCacheConfig:
    """The KV cache of the engine of `config`, as its scheduler would see it.

    Not for a process that has an engine, whose process groups would be replaced. Resolves in
    `config` what vLLM resolves at this point of a start, such as the block size.

    Raises:
        Exception: vLLM cannot build the model, or not on this platform.
    """
    with _as_one_rank(config), set_current_vllm_config(config):
        _make_groups_of_one()
        init_workspace_manager(torch.device("meta"))
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
            _build_draft_layers(config)
        current_platform.update_block_size_for_backend(config)
        core = EngineCore.__new__(EngineCore)  # no more of it than what the next call uses
        core.model_executor = cast(Executor, _PlannedWorkers(config))
        core.available_gpu_memory_for_kv_cache = -1
        return core._initialize_kv_caches(config)


def attention_groups(config: VllmConfig) -> list[list[AttentionGroup]]:
    """Each layer of `kv_cache_config` with its attention backend. In the place of the builder of
    its metadata is the builder's class, which says what can be captured in a graph."""
    layers = config.compilation_config.static_forward_context
    groups = []
    for name, spec in get_kv_cache_spec(config).items():
        backend: type[AttentionBackend] = layers[name].get_attn_backend()
        builders = [backend.get_builder_cls()]
        groups.append(AttentionGroup(backend, [name], spec, 0, metadata_builders=builders))
    return [groups]


def _build_draft_layers(config: VllmConfig) -> None:
    """Those of the model that drafts, whose KV cache is part of the engine's."""
    speculation = config.speculative_config
    if speculation is None:
        return
    if speculation.uses_draft_model():
        draft = replace(
            config,
            model_config=speculation.draft_model_config,
            quant_config=None,
            parallel_config=_one_rank(speculation.draft_parallel_config),
        )
        with set_model_tag("draft_model"):
            initialize_model(draft, prefix="draft_model")
    elif speculation.use_eagle():
        with set_model_tag("eagle_head"):
            initialize_model(config, model_config=speculation.draft_model_config)


@contextmanager
def _as_one_rank(config: VllmConfig) -> Iterator[None]:
    """While inside, the model is not split."""
    parallel = config.parallel_config
    config.parallel_config = _one_rank(parallel)
    try:
        yield
    finally:
        config.parallel_config = parallel


def _one_rank(parallel: ParallelConfig) -> ParallelConfig:
    one = copy.deepcopy(parallel)
    one.tensor_parallel_size = one.pipeline_parallel_size = one.data_parallel_size = 1
    one.decode_context_parallel_size = one.prefill_context_parallel_size = 1
    one.world_size = 1
    one.enable_expert_parallel = False
    return one


def _make_groups_of_one() -> None:
    """The process groups that layers ask for their rank and size. Which there are depends on the
    model: those of the one before are replaced."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # in memory: no port, no file
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    destroy_model_parallel()
    ensure_model_parallel_initialized(1, 1)


class _PlannedWorkers:
    """What an engine asks of its workers before it has a KV cache, answered from the layers."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [get_kv_cache_spec(self._config)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        backends = get_current_attn_backends(self._config)
        return [[layout.name for layout in get_supported_kv_cache_layouts(backends)]]

    def determine_available_memory(self) -> list[int]:
        return [AVAILABLE_BYTES]

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """There is no device to prepare."""

    set_kv_cache_layout = initialize_from_config = compile_or_warm_up_model = collective_rpc = (
        _nothing
    )
