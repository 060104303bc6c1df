# [tiers]
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadKey

class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: NDArray[np.int64]
