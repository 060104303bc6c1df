# [jump_forward]
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

class RopeState:
    num_dims: int
    prefill_positions: StagedWriteTensor
    prefill_delta: UvaBackedTensor
