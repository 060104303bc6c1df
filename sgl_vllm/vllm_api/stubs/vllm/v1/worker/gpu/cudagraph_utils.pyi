# [jump_graph_tokens]
from dataclasses import dataclass

from vllm.config.compilation import CUDAGraphMode

@dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = ...
    max_query_len: int | None = ...
    num_active_loras: int = ...

class CudaGraphManager:
    cudagraph_mode: CUDAGraphMode
    max_num_reqs: int
    lora_capture_cases: list[int]
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    graphs: dict[BatchExecutionDescriptor, object]

    def capture(self, create_forward_fn: object, progress_bar_desc: str = ...) -> None: ...
