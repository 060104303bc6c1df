from collections import deque
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

def generate_scheduler_kv_cache_config(
    kv_cache_configs: list[KVCacheConfig],
) -> KVCacheConfig: ...
def enable_envs_cache() -> None: ...

class EngineCore:
    scheduler: Scheduler
    model_executor: Executor  # [approximate_reuse, self_check, preview]
    available_gpu_memory_for_kv_cache: int  # [preview]
    vllm_config: VllmConfig  # [self_check]
    structured_output_manager: StructuredOutputManager  # [self_check]
    _iteration_index: int  # [self_check]
    batch_queue: deque[object] | None  # [self_check]
    step_fn: Callable[[], tuple[dict[int, EngineCoreOutputs] | None, bool]]  # [self_check]
    request_block_hasher: Callable[[Request], list[BlockHash]] | None

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig: ...
    def post_step(self, model_executed: bool) -> None: ...  # [self_check]
    def abort_requests(self, request_ids: list[str]) -> None: ...  # [self_check]
    def preprocess_add_request(  # [self_check]
        self, request: EngineCoreRequest
    ) -> tuple[Request, int]: ...
