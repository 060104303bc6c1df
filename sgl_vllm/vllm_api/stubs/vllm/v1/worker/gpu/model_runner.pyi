# [jump_forward, approximate_reuse]
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

class GPUModelRunner:
    vllm_config: VllmConfig  # [approximate_reuse]
    kv_caches: list[torch.Tensor]  # [approximate_reuse]
    req_states: RequestState
    model_state: DefaultModelState  # [jump_forward]
    sampler: Sampler | None  # [jump_forward]
    num_speculative_steps: int  # [jump_forward]

    def get_model(self) -> torch.nn.Module: ...  # [approximate_reuse]
    def add_requests(self, scheduler_output: SchedulerOutput) -> None: ...  # [jump_forward]
    def update_requests(self, scheduler_output: SchedulerOutput) -> None: ...
