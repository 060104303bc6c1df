# [prefix_attention]
from typing import Any

from vllm.v1.utils import CpuGpuBuffer

class BlockTable:
    block_table: CpuGpuBuffer

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
