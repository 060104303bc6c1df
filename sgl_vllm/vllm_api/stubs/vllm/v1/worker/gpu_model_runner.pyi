# [radix_slot_copy]
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

class GPUModelRunner:
    kv_caches: list[torch.Tensor]
    kv_cache_config: KVCacheConfig

    def _update_states(self, scheduler_output: SchedulerOutput) -> object: ...
