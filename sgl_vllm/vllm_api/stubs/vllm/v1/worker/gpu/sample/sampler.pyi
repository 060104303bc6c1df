# [jump_forward]
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

class Sampler:
    penalties_state: PenaltiesState
