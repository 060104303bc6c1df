# [prefix_attention]
class Platform:
    def is_cuda(self) -> bool: ...

current_platform: Platform
