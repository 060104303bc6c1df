# [jump_forward, approximate_reuse]
import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

class GPUModelRunner:
    vllm_config: VllmConfig  # [approximate_reuse]
    speculative_config: SpeculativeConfig | None  # [jump_forward]
    kv_caches: list[torch.Tensor]  # [approximate_reuse]
    requests: dict[str, CachedRequestState]  # [jump_forward]
    input_batch: InputBatch  # [jump_forward]
    # Of `SpeculativeConfig.use_ngram_gpu()` only.
    token_ids_gpu_tensor: torch.Tensor  # [jump_forward]
    num_tokens_no_spec_gpu: torch.Tensor  # [jump_forward]

    def get_model(self) -> torch.nn.Module: ...  # [approximate_reuse]
    def _update_states(self, scheduler_output: SchedulerOutput) -> object: ...
