# [approximate_reuse]
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

class Worker:
    model_runner: GPUModelRunner  # or the deprecated one
