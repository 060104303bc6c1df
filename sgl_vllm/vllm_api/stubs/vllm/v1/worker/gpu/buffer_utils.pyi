# [prefix_attention]
import numpy
from numpy.typing import NDArray

class UvaBackedTensor:
    np: NDArray[numpy.int32]
