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

TOLERANCE = 2e-3
"""How far, in radians, angles may be from proportional to the position: what float32 leaves of them
at the last positions of a long context."""


class Rotation:
    """The rotation of one model's keys.

    Args:
        cos_sin: shape (positions, rotary_dim), float32: for each position the cosines of the pairs'
            angles, then their sines, both times one factor.
        is_neox: pairs are a dimension of the first half and one of the second half of the rotary
            dimensions; otherwise they are neighbors.

    Raises:
        ValueError: the angles are not proportional to the position, so keys cannot be turned.
    """

    def __init__(self, cos_sin: torch.Tensor, is_neox: bool) -> None:
        if cos_sin.ndim != 2 or cos_sin.shape[1] % 2 or len(cos_sin) < 2:
            raise ValueError(f"angles have the shape {tuple(cos_sin.shape)}")
        cos, sin = cos_sin.double().chunk(2, dim=1)
        length = torch.hypot(cos, sin)
        if not bool(torch.allclose(length, length[0, 0], rtol=1e-3)):
            raise ValueError("the cosines and sines are scaled by more than one factor")
        self.rotary_dim = cos_sin.shape[1]
        self.is_neox = is_neox
        self.frequencies = _frequencies(torch.atan2(sin, cos))
        """Shape (rotary_dim / 2,): radians per position, float64."""
        self._on_device = self.frequencies
        last = len(cos_sin) - 1
        positions = torch.tensor(sorted({1, 2, 7, last // 3, last // 2, last}), dtype=torch.float64)
        angles = positions[:, None] * self.frequencies
        rows = positions.long()
        error = torch.hypot(
            cos[rows] / length[rows] - angles.cos(), sin[rows] / length[rows] - angles.sin()
        )
        if float(error.max()) > TOLERANCE * max(1.0, last / 10_000):
            raise ValueError("the angles are not proportional to the position")

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines that turn keys by `shifts` positions.

        Args:
            shifts: shape (tokens,), integers, negative for earlier positions.

        Returns:
            Each of shape (tokens, 1, rotary_dim / 2), float32.
        """
        if self._on_device.device != shifts.device:
            self._on_device = self.frequencies.to(shifts.device)
        angles = shifts.double()[:, None, None] * self._on_device
        return angles.cos().float(), angles.sin().float()

    def turn(self, keys: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Keys as they would be at other positions.

        Args:
            keys: shape (tokens, heads, head_size), any floating dtype.
            angles: one for each token, from `angles`.

        Returns:
            New keys, of the same dtype. Computed in float32.
        """
        cos, sin = angles
        rotary = keys[..., : self.rotary_dim].float()
        if self.is_neox:
            first, second = rotary.chunk(2, dim=-1)
        else:
            first, second = rotary[..., ::2], rotary[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        whole = torch.cat(turned, -1) if self.is_neox else torch.stack(turned, -1).flatten(-2)
        return torch.cat((whole.to(keys.dtype), keys[..., self.rotary_dim :]), dim=-1)


def _frequencies(angles: torch.Tensor) -> torch.Tensor:
    """Radians per position, from the angles at each position, which are known up to whole turns.

    The angle at position 1 gives the number of turns at position 2, that at 2 those at 4, and so
    on. Each time the error per position is halved.
    """
    turn = 2 * torch.pi
    frequencies = angles[1].clone()
    position = 2
    while position < len(angles):
        about = frequencies * position
        frequencies = (
            angles[position] + turn * ((about - angles[position]) / turn).round()
        ) / position
        position *= 2
    return frequencies
