# [jump_forward]
import numpy
from numpy.typing import NDArray

class PenaltiesState:
    use_penalty: NDArray[numpy.bool_]
    _new_penalties_reqs: list[int]
