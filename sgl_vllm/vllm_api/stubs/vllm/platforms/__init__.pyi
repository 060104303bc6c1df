from enum import Enum
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

class PlatformEnum(Enum):  # [preview]
    OOT = ...

class Platform:
    # What a device that is only planned for says of itself.
    _enum: PlatformEnum  # [preview]
    device_name: str  # [preview]
    device_type: str  # [preview]
    dispatch_key: str  # [preview]
    ray_device_key: str  # [preview]
    dist_backend: str  # [preview]
    device_control_env_var: str  # [preview]

    def is_cuda(self) -> bool: ...  # [prefix_attention]
    @classmethod
    def get_device_name(cls, device_id: int = ...) -> str: ...  # [self_check, preview]
    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None: ...  # [preview]
    @classmethod
    def import_kernels(cls) -> None: ...  # [preview]
    @classmethod
    def get_device_capability(  # [preview]
        cls, device_id: int = ...
    ) -> DeviceCapability | None: ...
    @classmethod
    def get_device_total_memory(cls, device_id: int = ...) -> int: ...  # [preview]
    @classmethod
    def num_compute_units(cls, device_id: int = ...) -> int: ...  # [preview]
    @classmethod
    def is_pin_memory_available(cls) -> bool: ...  # [preview]
    @classmethod
    def support_hybrid_kv_cache(cls) -> bool: ...  # [preview]
    @classmethod
    def support_static_graph_mode(cls) -> bool: ...  # [preview]
    @classmethod
    def supports_fp8(cls) -> bool: ...  # [preview]
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None: ...  # [preview]
    @classmethod
    def get_attn_backend_cls(  # [preview]
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = ...,
    ) -> str: ...
    @classmethod
    def get_mla_prefill_backend_cls(  # [preview] since 0.32
        cls, mla_selector_config: Any
    ) -> type[Any]: ...

current_platform: Platform

def resolve_current_platform_cls_qualname() -> str: ...  # [preview]
