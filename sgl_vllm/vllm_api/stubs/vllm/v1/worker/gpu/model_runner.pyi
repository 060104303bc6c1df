# [radix_slot_copy]
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

class GPUModelRunner:
    kv_caches: list[torch.Tensor]
    kv_cache_config: KVCacheConfig

    def update_requests(self, scheduler_output: SchedulerOutput) -> None: ...
