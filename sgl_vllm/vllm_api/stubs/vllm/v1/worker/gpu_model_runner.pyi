# [approximate_reuse]
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

class GPUModelRunner:
    vllm_config: VllmConfig  # [approximate_reuse]
    kv_caches: list[torch.Tensor]

    def get_model(self) -> torch.nn.Module: ...  # [approximate_reuse]
    def _update_states(self, scheduler_output: SchedulerOutput) -> object: ...
