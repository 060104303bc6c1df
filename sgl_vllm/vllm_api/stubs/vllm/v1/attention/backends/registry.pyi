# [prefix_attention, preview]
from enum import Enum

class AttentionBackendEnum(Enum):
    CUSTOM = ...
    FLASH_ATTN = ...
    TRITON_ATTN = ...  # [preview]
    TRITON_MLA = ...  # [preview]
    FLASHMLA_SPARSE = ...  # [preview]

    def get_path(self) -> str: ...  # [preview]

def register_backend(backend: AttentionBackendEnum, class_path: str | None = ...) -> object: ...
