from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.compilation.cuda_graph import CUDAGraphStat

class ModelRunnerOutput:
    req_id_to_index: dict[str, int]  # [jump_forward]
    sampled_token_ids: list[list[int]]  # [jump_forward]
    kv_connector_output: KVConnectorOutput | None
    cudagraph_stats: CUDAGraphStat | None  # [jump_forward]

class DraftTokenIds: ...  # [jump_forward]

class LogprobsLists(NamedTuple):
    logprob_token_ids: NDArray[np.int32]  # [jump_forward]
    logprobs: NDArray[np.float32]  # [jump_forward]
    sampled_token_ranks: NDArray[np.int32]  # [jump_forward]

class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor  # [select]
    logprobs: torch.Tensor  # [select]
    selected_token_ranks: torch.Tensor  # [select]

class KVConnectorOutput:  # [tiers]
    finished_recving: set[str] | None
    failed_recving: set[str]
    invalid_block_ids: set[int]
