# [jump_forward]
from vllm.v1.worker.gpu.mm.rope import RopeState

class DefaultModelState:
    rope_state: RopeState | None

    def apply_staged_writes(self) -> None: ...
