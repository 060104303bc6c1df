class Platform:
    def is_cuda(self) -> bool: ...  # [prefix_attention]
    @classmethod
    def get_device_name(cls, device_id: int = ...) -> str: ...  # [self_check]

current_platform: Platform
