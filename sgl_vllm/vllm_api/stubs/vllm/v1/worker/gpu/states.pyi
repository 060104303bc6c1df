# [approximate_reuse]
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

class RequestState:
    req_id_to_index: dict[str, int]
    num_computed_tokens: StagedWriteTensor
