# [jump_forward, approximate_reuse]
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

class BatchReqState(NamedTuple):  # [jump_graph_tokens]
    num_scheduled_tokens: NDArray[np.int32]
    idx_mapping_np: NDArray[np.intp]
    num_computed_prefill_tokens_np: NDArray[np.int32]
    is_prefilling_np: NDArray[np.bool_]
    has_prefill: bool
    prefill_runs_as_decode_np: NDArray[np.bool_] | None

class GPUModelRunner:
    vllm_config: VllmConfig  # [approximate_reuse, jump_graph_tokens]
    attn_groups: list[list[AttentionGroup]]  # [jump_graph_tokens]
    cudagraph_manager: CudaGraphManager | None  # [jump_graph_tokens]
    kv_caches: list[torch.Tensor]  # [approximate_reuse]
    req_states: RequestState
    model_state: DefaultModelState  # [jump_forward]
    sampler: Sampler | None  # [jump_forward]
    num_speculative_steps: int  # [jump_forward]

    def get_model(self) -> torch.nn.Module: ...  # [approximate_reuse]
    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig
    ) -> None: ...  # [jump_graph_tokens]
    def gather_batch_req_state(  # [jump_graph_tokens]
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]: ...
    def prepare_inputs(  # [jump_graph_tokens]
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch: ...
    def add_requests(self, scheduler_output: SchedulerOutput) -> None: ...  # [jump_forward]
    def update_requests(self, scheduler_output: SchedulerOutput) -> None: ...
