"""The Triton kernels against their references in plain PyTorch, in the heads of real models.

What is asked and how it is compared is that of `benchmarks.kernels`, which on CUDA also runs vLLM's
own kernel: its distance from the reference is what rounding alone makes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import kernels
from tests.gpu.configuration import on_cpu

try:
    HAS_CUDA = kernels.prepare()
except RuntimeError as error:  # only without CUDA: another file of this process has loaded Triton
    pytest.skip(f"in a process of their own: {error}", allow_module_level=True)

assert on_cpu() != HAS_CUDA, "SGL_VLLM_TEST_DEVICE says cpu, and there is a CUDA device"

HEADS = {
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-7b": (28, 4, 128),
    "llama-3-8b": (32, 8, 128),
    "one head each": (16, 16, 64),
    "one for all": (16, 1, 128),
    "wide": (8, 4, 256),
}
"""Query heads, heads of keys and values, and the size of each."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of values around 1, whose means over many keys are smaller."""

HEADS_AND_TYPES = [
    *((heads, torch.bfloat16) for heads in HEADS),
    *((heads, torch.float16) for heads in ("qwen2.5-0.5b", "qwen2.5-7b")),
]
"""Each is tuned anew, which takes a GPU seconds."""

BATCHES = {
    "all share": kernels.Case(64, ((2048, 1),)),
    "levels": kernels.Case(48, ((1024, 1), (512, 6)), own_tokens=77),
    "nobody shares": kernels.Case(9, ((0, 1),), own_tokens=501),
    "one request": kernels.Case(1, ((2048, 1),)),
    "long": kernels.Case(16, ((16384, 1),), own_tokens=3),
}


def assert_close(row: dict, dtype: torch.dtype) -> None:
    limit = max(TOLERANCE[dtype], 2 * row.get("stock_off", 0.0))
    assert row["off"] <= limit, row


@pytest.mark.parametrize(("heads", "dtype"), HEADS_AND_TYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_prefix_decode(batch: str, heads: str, dtype: torch.dtype) -> None:
    count, groups, size = HEADS[heads]
    case = replace(
        BATCHES[batch], num_heads=count, num_kv_heads=groups, head_size=size, dtype=dtype
    )
    assert_close(kernels.measure(case, HAS_CUDA), dtype)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_prefix_decode_on_blocks_of(block_size: int) -> None:
    case = replace(BATCHES["levels"], block_size=block_size)
    assert_close(kernels.measure(case, HAS_CUDA), case.dtype)
