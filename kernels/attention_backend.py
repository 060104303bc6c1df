"""vLLM's FlashAttention backend, with decode steps whose requests share KV computed in groups.

The adapter between vLLM 0.32 and `decode_step`. For a batch of one query token per request, with a
plan that pays, it calls our kernel; for all else FlashAttention, unchanged. vLLM itself has nothing
of the kind: its cascade attention is gone, and `common_prefix_len` is always 0.

    vllm serve MODEL --plugin sgl_vllm --plugin-config prefix_attention=true

which calls `register` in every process and chooses the backend.

- *CPU cost, no wait for the GPU.* A plan is made from the block table as the runner wrote it on the
  CPU and the lengths that it knows there (upper bounds under asynchronous speculation: the kernel
  takes each request's true length). About 0.5 to 2 ms when the batch changes, 0.1 ms when it has
  only grown; then one copy of some kilobytes. All layers share it. Each layer then is three Triton
  launches.
- *Where the block table comes from.* Builders get it on the device alone. `watch_block_tables`
  remembers what is written to the tables of vLLM's V2 model runner. A table that is not known, one
  for other block sizes of a kernel say, gives no plan.
- *CUDA graphs.* A plan's number of programs changes, so the backend supports no full graphs, and
  vLLM falls back to piecewise ones, in which attention runs by itself. Whether groups win back what
  full graphs save is for a GPU to say; without shared prefixes they cannot.
- *First steps.* Tile sizes are tuned when a size of group first comes (up to four sizes, seconds
  each, kept by Triton only with TRITON_CACHE_AUTOTUNING=1), and partial results are allocated then,
  some 10 to 30 MB, after vLLM has measured its memory: both are to be warmed up before this serves.
- *Batch invariance* (VLLM_BATCH_INVARIANT) turns groups off, because sums depend on which requests
  share. Without it, results differ from FlashAttention's by rounding, as they do between its own
  split counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: arguments of vLLM's

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
    is_quantized_kv_cache,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sgl_vllm.vllm_api.patching import wrap

from .decode_step import Layer, Planner, attend, num_decodes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.block_table import BlockTables
from .prefix_attention import DevicePlan
from .prefix_levels import AttentionShape, Ints

logger = init_logger(__name__)


def register() -> None:
    """Make `--attention-backend CUSTOM` this backend, in this process."""
    watch_block_tables()
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{PrefixGroupedBackend.__qualname__}")


class PrefixGroupedBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the name that it is registered by

    @staticmethod
    def get_impl_cls() -> type[PrefixGroupedImpl]:
        return PrefixGroupedImpl

    @staticmethod
    def get_builder_cls() -> type[PrefixGroupedBuilder]:
        return PrefixGroupedBuilder


@dataclass
class PrefixGroupedMetadata(FlashAttentionMetadata):
    """`prefix_plan` is for the first `prefix_plan.plan.num_requests` rows of the batch."""

    prefix_plan: DevicePlan | None = None


class PrefixGroupedBuilder(FlashAttentionMetadataBuilder):
    # Another group's block table would not be the plan's.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planner: Planner | None = None
        self._on_device: DevicePlan | None = None
        if self.dcp_world_size == 1 and not envs.VLLM_BATCH_INVARIANT:
            shape = AttentionShape(
                num_heads=self.num_heads_q,
                num_kv_heads=self.num_heads_kv,
                head_size=self.headdim,
                itemsize_bytes=self.kv_cache_dtype.itemsize,
                block_size_tokens=self.block_size,
            )
            self._planner = Planner(shape)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PrefixGroupedMetadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        plan = None if fast_build else self._plan_of(common_attn_metadata)
        return PrefixGroupedMetadata(**vars(made), prefix_plan=plan)

    def _plan_of(self, batch: CommonAttentionMetadata) -> DevicePlan | None:
        if self._planner is None:
            return None
        found = host_batch(batch)
        plan = None if found is None else self._planner.plan(*found)
        if plan is None:
            self._on_device = None
        elif self._on_device is None or self._on_device.plan is not plan:
            self._on_device = DevicePlan.upload(plan, self.device)
        return self._on_device


def host_batch(batch: CommonAttentionMetadata) -> tuple[Ints, Ints] | None:
    """Block table and lengths on the CPU of a batch of single query tokens that see all before
    them; None for any other batch, and where vLLM has not told."""
    if batch.max_query_len != 1 or batch.causal is not True or batch.rswa_prefix_lens is not None:
        return None
    if batch.seq_lens_cpu_upper_bound is None:
        return None
    count = num_decodes(batch.query_start_loc_cpu.numpy())
    find_rows = _rows_by_address.get(batch.block_table_tensor.data_ptr())
    if not count or find_rows is None:
        return None
    table = find_rows(count, batch.req_idx)
    return None if table is None else (table, batch.seq_lens_cpu_upper_bound.numpy()[:count])


class PrefixGroupedImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer = Layer(
            head_size=self.head_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            is_decoder=self.attn_type == AttentionType.DECODER,
            has_sliding_window=self.sliding_window != (-1, -1),
            has_alibi=self.alibi_slopes is not None,
            has_softcap=bool(self.logits_soft_cap),
            has_sinks=self.sinks is not None,
            has_quantized_cache=is_quantized_kv_cache(self.kv_cache_dtype),
            decode_context_parallel=self.dcp_world_size,
        )
        self.groups = layer.why_not is None
        if layer.why_not:
            logger.info_once("Decode of a layer is not grouped by prefix: %s", layer.why_not)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = getattr(attn_metadata, "prefix_plan", None)
        fused = output_scale is not None or output_block_scale is not None
        if plan is None or fused or not self.groups or plan.plan.shape.num_heads != self.num_heads:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        assert attn_metadata is not None
        attend(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            plan,
            self.scale,
            output,
        )
        return output


# -- block tables on the CPU

FindRows = Callable[[int, "Ints | None"], "Ints | None"]

_rows_of_tables: weakref.WeakKeyDictionary[BlockTables, list[Ints]] = weakref.WeakKeyDictionary()
"""What was written to the runner's tables, by KV cache group: a row per request."""

_rows_by_address: dict[int, FindRows] = {}
"""By the address of the table on the device: from the number of rows and, for each, the runner's
request, to these rows on the CPU; None if the table is gone."""


def watch_block_tables() -> None:
    """Remember every block table that is made from now on. Idempotent. Wraps, and calls, methods
    of the V2 runner's tables; belongs to `plugin.register` once the backend is one of its parts."""
    from vllm.v1.worker.gpu import block_table

    wrap(block_table.BlockTables, "__init__")(_remember)
    wrap(block_table.BlockTables, "append_block_ids")(_mirror)


# Any: arguments of vLLM's that pass through.
def _remember(
    original: Callable[..., None], tables: BlockTables, *args: Any, **kwargs: Any
) -> None:
    original(tables, *args, **kwargs)
    _rows_of_tables[tables] = [
        np.zeros(tuple(table.shape), dtype=np.int32) for table in tables.input_block_tables
    ]
    known = weakref.ref(tables)
    for group, device_table in enumerate(tables.input_block_tables):

        def find(count: int, requests: Ints | None, group: int = group) -> Ints | None:
            alive = known()
            if alive is None or requests is None or len(requests) < count:
                return None
            return _rows_of_tables[alive][group][np.asarray(requests[:count])]

        _rows_by_address[device_table.data_ptr()] = find


def _mirror(
    original: Callable[..., None],
    tables: BlockTables,
    req_index: int,
    new_block_ids: tuple[list[int], ...],
    overwrite: bool,
) -> None:
    """After the runner has noted the new blocks, where they end is known."""
    original(tables, req_index, new_block_ids, overwrite)
    for rows, num_blocks, block_ids in zip(
        _rows_of_tables.get(tables, ()), tables.num_blocks.np, new_block_ids, strict=False
    ):
        end = int(num_blocks[req_index])
        ids = [0] * len(block_ids) if tables.redirect_writes_to_null_block else block_ids
        rows[req_index, end - len(ids) : end] = ids
