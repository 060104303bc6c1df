# [approximate_reuse]
import vllm.v1.worker.gpu.model_runner
import vllm.v1.worker.gpu_model_runner

class Worker:
    model_runner: (
        vllm.v1.worker.gpu_model_runner.GPUModelRunner
        | vllm.v1.worker.gpu.model_runner.GPUModelRunner
    )
