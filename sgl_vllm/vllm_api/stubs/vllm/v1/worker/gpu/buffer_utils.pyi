# [jump_forward, prefix_attention, approximate_reuse]
from collections.abc import Iterable

import numpy
import torch
from numpy.typing import NDArray

class StagedWriteTensor:  # [jump_forward, approximate_reuse]
    gpu: torch.Tensor  # [approximate_reuse]

    def stage_write(self, index: int, start: int, x: Iterable[int]) -> None: ...  # [jump_forward]
    def stage_write_elem(self, index: int, x: int) -> None: ...  # [jump_forward]

class UvaBackedTensor:  # [jump_forward, prefix_attention]
    np: NDArray[numpy.int32]
