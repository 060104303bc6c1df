"""Rotary positions: what turns a key computed at one position into the key at another.

Owns the angles. Does not own how pairs are turned by them, which is the model's rotary embedding's,
nor where keys are (`kv_layout.py`, `copies.py`).

A rotary embedding turns pairs of a key's dimensions by angles that grow with the position, each
pair by a frequency of its own (RoFormer, Su et al., arXiv 2104.09864). Turning by a and then by b
is turning by a + b. So the key of a token at position p becomes that of the same token at p + n if
it is turned as a key at position n is, backward for a negative n. Scaled embeddings (linear, Llama
3, YaRN) have other frequencies, and YaRN lengthens keys by a factor, which they already have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


class Rotation:
    """The rotation of the keys of one rotary embedding.

    Args:
        max_positions: of a prompt.

    Raises:
        ValueError: keys that are turned are not those that the model has at the other position.
    """

    def __init__(self, rotary: RotaryEmbedding, max_positions: int) -> None:
        cos_sin = rotary._compute_cos_sin_cache()[:max_positions].float().cpu()
        self._rotary = rotary
        self._turns = cos_sin / cos_sin[0, 0]
        """Shape (positions, rotary_dim): the cosines of the pairs' angles, then their sines."""
        last = len(cos_sin) - 1
        places = torch.tensor([[0, 0, last, last // 2, 3], [1, last, 0, last // 3, last]])
        keys = torch.randn(5, 2, rotary.head_size, generator=torch.Generator().manual_seed(0))
        before, after = (self.turn(keys, cos_sin, at) for at in places)
        turned = self.turn(before, self.angles(places[1] - places[0]), torch.arange(5))
        if not torch.allclose(turned, after, atol=0.02):
            raise ValueError("the model's rotary embedding turns keys in another way")

    def angles(self, shifts: torch.Tensor) -> torch.Tensor:
        """The angles that turn keys by `shifts` positions.

        Args:
            shifts: shape (shifts,), integers on the CPU, negative for earlier positions.

        Returns:
            Cosines and sines, shape (shifts, rotary_dim), on the CPU.
        """
        cos, sin = self._turns[shifts.abs()].chunk(2, dim=1)
        return torch.cat((cos, sin * shifts.sign()[:, None]), dim=1)

    def turn(self, keys: torch.Tensor, angles: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Keys as they would be at other positions, of the same dtype. Computed in float32.

        Args:
            keys: shape (tokens, heads, head_size), any floating dtype.
            angles: from `angles`, on the same device.
            which: of each token, a row of `angles`, on the same device.
        """
        rotary = self._rotary
        turned, _ = rotary.forward_static(
            which, keys.float(), None, rotary.head_size, rotary.rotary_dim, angles,
            rotary.is_neox_style,
        )  # fmt: skip
        return turned.to(keys.dtype)
