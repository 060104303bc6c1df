# [prefix_attention, approximate_reuse]
import numpy
import torch
from numpy.typing import NDArray

class StagedWriteTensor:  # [approximate_reuse]
    gpu: torch.Tensor

class UvaBackedTensor:  # [prefix_attention]
    np: NDArray[numpy.int32]
