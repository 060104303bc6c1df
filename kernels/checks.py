"""What the kernels ask of their arguments alike, and whether Triton interprets them. Nothing here
waits for the device."""

from __future__ import annotations

import torch
import triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter: `triton.jit` decides it, above each of them."""


def check_query(query: torch.Tensor) -> None:
    """Raises ValueError unless the kernels take its head size, last dimension, and dtype."""
    head_size = query.shape[-1]
    if head_size % 16 or not 0 < head_size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"head_size must be a multiple of 16 up to {MAX_HEAD_SIZE}, not {head_size}"
        )
    if query.dtype not in DTYPES:
        raise ValueError(f"query must be bfloat16, float16 or float32, not {query.dtype}")


def check_runs_on(device: torch.device) -> None:
    """Raises ValueError if Triton has no way to run a kernel there."""
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"the kernel runs on a GPU, or on a CPU with TRITON_INTERPRET=1, not on {device.type}"
        )
