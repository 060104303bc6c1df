"""The kernels compile for GPUs, for which none is needed.

The interpreter lets more through, and says nothing of registers, shared memory and tensor cores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sgl_vllm.kernels import prefix_attention

pytestmark = pytest.mark.slow

AMPERE, HOPPER = 80, 90
SHARED_BYTES = {AMPERE: 163 * 1024, HOPPER: 227 * 1024}
"""What a program may have."""


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or it warns that it is not set
    try:
        assert get_ptxas(AMPERE).path and get_ptxas(HOPPER).path
    except (RuntimeError, AssertionError):
        pytest.skip("this triton comes without an assembler for GPUs")


def compiled(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    **options: int,
) -> Any:
    """`types` of the arguments that are not constant; those not named are int32. Pointers and
    strides are multiples of 16."""
    # vLLM has Triton keep what it has tuned in a JSON file, under the key.
    json.dumps([constants[name] for name in kernel.keys if name in constants])
    signature, values, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.fn.params):
        name = parameter.name
        if name in constants:
            signature[name], values[(number,)] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if signature[name].startswith("*") or "_stride_" in name:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel.fn, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def types_of_decode(dtype: str) -> dict[str, str]:
    """Of the arguments of prefix-grouped decode's kernels; the cache holds `dtype`."""
    index = ("block_table", "seq_lens", "items", "members", "slots", "partial_starts")
    return {
        **dict.fromkeys(("query", "key_cache", "value_cache", "out"), f"*{dtype}"),
        **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
        **dict.fromkeys(index, "*i32"),
        "scale_log2": "fp32",
    }


@pytest.mark.parametrize(
    ("capability", "dtype", "rows", "head_size", "block_size"),
    [
        pytest.param(HOPPER, "bf16", 128, 128, 16, id="wide, Hopper"),
        pytest.param(HOPPER, "bf16", 16, 128, 16, id="narrow, Hopper"),
        pytest.param(AMPERE, "fp16", 128, 80, 48, id="wide, Ampere"),
    ],
)
def test_items_of_prefix_grouped_decode(
    capability: int, dtype: str, rows: int, head_size: int, block_size: int
) -> None:
    constants = {
        "HEADS_PER_KV_HEAD": 4,
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_PADDED": triton.next_power_of_2(head_size),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": rows,
        "FIELDS": 8,
        "WIDEN": False,
    }
    configs = prefix_attention._fitting(prefix_attention._item_configs(), {}, **constants)
    config = configs[0]
    made = compiled(
        prefix_attention._item_kernel,
        capability,
        types_of_decode(dtype),
        {**constants, **config.kwargs},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert made.metadata.shared <= SHARED_BYTES[capability]
    text = made.asm["ptx"]
    assert "cp.async" in text  # the next keys are loaded while these are multiplied
    assert ("wgmma.mma_async" if capability == HOPPER and rows > 16 else "mma.sync") in text
