"""Rotary positions: what turns a key computed at one position into the key at another.

Owns the angles of a model's rotary embedding, and the rotation. Does not own where keys are
(`kv_layout.py`, `copies.py`).

A rotary embedding turns pairs of a key's dimensions by angles that grow with the position, each
pair by a frequency of its own (RoFormer, Su et al., arXiv 2104.09864). Turning by a and then by b
is turning by a + b. So the key of a token at position p becomes that of the same token at p + n if
it is turned as a key at position n is, backward for a negative n. Scaled embeddings (linear, Llama
3, YaRN) have other frequencies, and YaRN lengthens keys by a factor, which they already have.
"""

from __future__ import annotations

import torch


class Rotation:
    """The rotation of one model's keys.

    Args:
        cos_sin: shape (positions, rotary_dim), float32: for each position the cosines of the pairs'
            angles, then their sines, both times one factor.
        is_neox: pairs are a dimension of the first half and one of the second half of the rotary
            dimensions; otherwise they are neighbors.
    """

    def __init__(self, cos_sin: torch.Tensor, is_neox: bool) -> None:
        self.rotary_dim = cos_sin.shape[1]
        self.is_neox = is_neox
        turns = torch.complex(*cos_sin.chunk(2, dim=1))
        self._turns = turns / turns[0, 0].abs()
        """Shape (positions, rotary_dim / 2): of unit length."""

    def angles(self, shifts: torch.Tensor) -> torch.Tensor:
        """The angles that turn keys by `shifts` positions, as complex numbers of unit length.

        Args:
            shifts: shape (tokens,), integers on the CPU, negative for earlier positions.

        Returns:
            Shape (tokens, 1, rotary_dim / 2), on the CPU.
        """
        turns = self._turns[shifts.abs()]
        return torch.where(shifts[:, None] < 0, turns.conj(), turns)[:, None]

    def turn(self, keys: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Keys as they would be at other positions.

        Args:
            keys: shape (tokens, heads, head_size), any floating dtype.
            angles: one for each token, or one for all, from `angles`, on the same device.

        Returns:
            New keys, of the same dtype. Computed in float32.
        """
        cos, sin = angles.real, angles.imag
        rotary = keys[..., : self.rotary_dim].float()
        if self.is_neox:
            first, second = rotary.chunk(2, dim=-1)
        else:
            first, second = rotary[..., ::2], rotary[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        whole = torch.cat(turned, -1) if self.is_neox else torch.stack(turned, -1).flatten(-2)
        return torch.cat((whole.to(keys.dtype), keys[..., self.rotary_dim :]), dim=-1)
