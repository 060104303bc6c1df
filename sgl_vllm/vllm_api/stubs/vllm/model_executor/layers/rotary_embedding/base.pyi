# [approximate_reuse]
import torch

class RotaryEmbedding:
    head_size: int
    rotary_dim: int
    is_neox_style: bool

    def _compute_cos_sin_cache(self) -> torch.Tensor: ...
    @staticmethod
    def forward_static(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: torch.Tensor,
        is_neox_style: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = ...
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
