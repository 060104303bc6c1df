# [jump_forward, approximate_reuse]
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

class RequestState:
    req_id_to_index: dict[str, int]
    num_computed_tokens: StagedWriteTensor
    prompt_len: UvaBackedTensor  # [jump_graph_tokens]
    prefill_len: UvaBackedTensor  # [jump_forward]
    total_len: StagedWriteTensor  # [jump_forward]
    all_token_ids: StagedWriteTensor  # [jump_forward]

    def apply_staged_writes(self) -> None: ...  # [jump_forward]
