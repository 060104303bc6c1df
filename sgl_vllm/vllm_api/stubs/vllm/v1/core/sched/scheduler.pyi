from typing import Any

from vllm.config import CacheConfig, VllmConfig
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

class Scheduler:
    vllm_config: VllmConfig
    cache_config: CacheConfig
    connector: KVConnectorBase_V1 | None
    kv_cache_manager: KVCacheManager
    kv_event_publisher: EventPublisher  # [self_check]
    structured_output_manager: StructuredOutputManager
    policy: SchedulingPolicy
    block_size: int
    hash_block_size: int  # [jump_forward]
    max_model_len: int
    use_v2_model_runner: bool
    has_mamba_layers: bool  # [jump_forward]
    requests: dict[str, Request]
    running: list[Request]
    max_num_running_reqs: int  # [approximate_reuse]
    waiting: RequestQueue
    max_num_active_reqs: int  # [schedule, approximate_reuse]
    kv_holding_waiting: RequestQueue  # [jump_forward, self_check]
    deferred_waiting: set[Request]  # [jump_forward, self_check]
    prev_step_scheduled_req_ids: set[str]  # [self_check]
    max_num_scheduled_tokens: int  # [approximate_reuse, self_check]
    finished_req_ids: set[str]  # [approximate_reuse, self_check]
    # What canaries may leave after a fault.
    sched_step_seq: int  # [self_check]
    processed_step_seq: int  # [self_check]

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *args: Any,
        **kwargs: Any,
    ) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def schedule(self, throttle_prefills: bool = ...) -> SchedulerOutput: ...
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]: ...
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None: ...  # [jump_forward]
    def _update_request_with_output(  # [jump_forward]
        self, request: Request, new_token_ids: list[int], is_stale: bool = ...
    ) -> tuple[list[int], bool]: ...
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None: ...
    def reset_prefix_cache(
        self, reset_running_requests: bool = ..., reset_connector: bool = ...
    ) -> bool: ...
    def _handle_blocked_waiting_request(self, request: Request) -> bool: ...  # [jump_forward]
    def _mamba_block_aligned_split(  # [radix]
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = ...,
        num_external_computed_tokens: int = ...,
    ) -> int: ...
    def _reserve_prefill_lookahead(  # [approximate_reuse]
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int: ...
    def _get_local_prefix_cache_hit(
        self,
        request: Request,
        max_cache_hit_length: int | None = ...,  # since 0.33
    ) -> tuple[KVCacheBlocks, int, int, bool]: ...
    def has_requests(self) -> bool: ...  # [self_check]
    def make_stats(self) -> object: ...  # [self_check]
    def _drain_deferred_frees(self) -> None: ...  # [self_check]
    def _free_request(self, request: Request) -> object: ...  # [jump_forward, self_check]
