# [jump_forward]
import numpy
from numpy.typing import NDArray

class CachedRequestState:
    req_id: str
    output_token_ids: list[int]
    num_prompt_tokens: int

class InputBatch:
    req_id_to_index: dict[str, int]
    prev_req_id_to_index: dict[str, int] | None
    token_ids_cpu: NDArray[numpy.int32]
    is_token_ids: NDArray[numpy.bool_]
    num_tokens_no_spec: NDArray[numpy.int32]

    def add_request(self, request: CachedRequestState) -> int: ...
