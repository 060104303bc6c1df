"""Turned keys, against keys that were computed at the other position with complex numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from sgl_vllm.approximate.rotation import Rotation
from tests.effort import examples


def frequencies_of(rotary_dim: int, base: float, divisor: float = 1.0) -> torch.Tensor:
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / divisor


def table(frequencies: torch.Tensor, num_positions: int, factor: float = 1.0) -> torch.Tensor:
    """As models keep it: float32, computed in float32."""
    angles = torch.arange(num_positions).float()[:, None] * frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), 1) * factor


def rotation_of(cos_sin: torch.Tensor, head_size: int, is_neox: bool = True) -> Rotation:
    """With vLLM's way to turn keys."""
    rotary: Any = SimpleNamespace(
        head_size=head_size,
        rotary_dim=cos_sin.shape[1],
        is_neox_style=is_neox,
        forward_static=RotaryEmbedding.forward_static,
        _compute_cos_sin_cache=lambda: cos_sin,
    )
    return Rotation(rotary, len(cos_sin))


def at_position(keys: torch.Tensor, position: int, frequencies, is_neox: bool) -> torch.Tensor:
    """Each pair of dimensions as a complex number, multiplied by e^(i * angle)."""
    half = len(frequencies)
    out = keys.double().clone()
    for pair, frequency in enumerate(frequencies.tolist()):
        one, other = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        number = torch.complex(keys[..., one].double(), keys[..., other].double())
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        turned = number * torch.polar(torch.tensor(1.0, dtype=torch.float64), angle)
        out[..., one], out[..., other] = turned.real, turned.imag
    return out


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from([8, 32, 64]),
    st.sampled_from([0, 16]),
    st.sampled_from([10_000.0, 500_000.0]),
    st.booleans(),
    st.sampled_from([1.0, 1.3]),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), min_size=1, max_size=4),
)
def test_a_turned_key_is_that_of_the_other_position(
    dim, rest, base, is_neox, factor, places
) -> None:
    frequencies = frequencies_of(dim, base)
    rotation = rotation_of(table(frequencies, 4096, factor), dim + rest, is_neox)
    keys = torch.randn(len(places), 2, dim + rest, generator=torch.Generator().manual_seed(0))
    before, after = (
        torch.stack(
            [
                at_position(key, place[which], frequencies, is_neox)
                for key, place in zip(keys, places, strict=True)
            ]
        )
        for which in (0, 1)
    )
    shifts = torch.tensor([b - a for a, b in places])
    which = torch.arange(len(places))
    turned = rotation.turn(before.float(), rotation.angles(shifts), which)
    torch.testing.assert_close(turned.double(), after, atol=5e-3, rtol=0)


def test_a_key_keeps_its_dtype_and_its_dimensions_without_a_position() -> None:
    rotation = rotation_of(table(frequencies_of(8, 10_000.0), 64), 12, is_neox=False)
    keys = torch.ones(1, 1, 12, dtype=torch.bfloat16)
    turned = rotation.turn(keys, rotation.angles(torch.tensor([5])), torch.tensor([0]))
    assert turned.dtype == torch.bfloat16 and turned[..., 8:].tolist() == [[[1.0] * 4]]
    assert turned[..., :8].tolist() != keys[..., :8].tolist()


def test_angles_that_are_not_proportional_to_the_position_are_refused() -> None:
    frequencies = frequencies_of(8, 100.0)
    angles = torch.arange(64).float()[:, None] ** 1.2 * frequencies.float()
    of_two_factors = table(frequencies, 64)
    of_two_factors[32:] *= 2

    for cos_sin in (torch.cat((angles.cos(), angles.sin()), 1), of_two_factors):
        with pytest.raises(ValueError, match="in another way"):
            rotation_of(cos_sin, 8)
