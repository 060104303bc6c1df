import torch

class MultiModalFeatureSpec:
    identifier: str  # [radix]
    modality: str  # [jump_forward]
    mm_position: PlaceholderRange  # [radix]

class PlaceholderRange:  # [radix]
    offset: int
    length: int
    is_embed: torch.Tensor | None
