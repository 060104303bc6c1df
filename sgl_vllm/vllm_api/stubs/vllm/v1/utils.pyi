# [prefix_attention]
import numpy
import torch
from numpy.typing import NDArray

class CpuGpuBuffer:
    np: NDArray[numpy.int32]
    gpu: torch.Tensor
