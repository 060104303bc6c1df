# [jump_forward]
class CUDAGraphStat:
    runtime_mode: str
