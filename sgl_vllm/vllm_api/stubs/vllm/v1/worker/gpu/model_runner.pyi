# [approximate_reuse]
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.states import RequestState

class GPUModelRunner:
    vllm_config: VllmConfig  # [approximate_reuse]
    kv_caches: list[torch.Tensor]
    req_states: RequestState  # [approximate_reuse]

    def get_model(self) -> torch.nn.Module: ...  # [approximate_reuse]
    def update_requests(self, scheduler_output: SchedulerOutput) -> None: ...
