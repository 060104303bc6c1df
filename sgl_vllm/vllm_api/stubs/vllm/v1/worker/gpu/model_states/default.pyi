# [jump_forward]
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.mm.rope import RopeState

class DefaultModelState:
    rope_state: RopeState | None

    def apply_staged_writes(self) -> None: ...
    def get_additional_cg_support(  # [jump_graph_tokens]
        self,
    ) -> tuple[AttentionCGSupport, str | None]: ...
