# [radix]
import torch

class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange

class PlaceholderRange:
    offset: int
    length: int
    is_embed: torch.Tensor | None
