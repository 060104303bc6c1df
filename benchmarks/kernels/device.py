"""What the kernels' benchmarks have in common: the device, times on it and stock's, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

NO_CUDA = (
    "Times need a CUDA device, and there is none here: below are the bytes of each case, counted, "
    "and how far results are off on a small case of its kind in Triton's interpreter."
)


def prepare() -> bool:
    """Whether there is a CUDA device; without one, Triton interprets what is imported from now on.

    Raises:
        RuntimeError: Triton was imported before this could be said.
    """
    if torch.cuda.is_available():
        return True
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("without CUDA, set TRITON_INTERPRET=1 before triton is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    return False


def milliseconds(call: Callable[[], object]) -> float:
    """The median over repetitions on the GPU, its L2 cache emptied before each. A call that keeps
    the GPU waiting for the CPU takes that time too."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def times(
    call: Callable[[], object], stock: Callable[[], object], least_bytes: int
) -> dict[str, float]:
    """Of a kernel and of what vLLM does instead, as a row has them."""
    ms, stock_ms = milliseconds(call), milliseconds(stock)
    return {
        "ms": ms,
        "stock_ms": stock_ms,
        "ratio": stock_ms / ms,
        "gb_s": least_bytes / ms / 1e6,
    }


def flash_attention(
    arguments: Mapping[str, torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
) -> Callable[[], torch.Tensor]:
    """vLLM's attention over a paged cache, as its FlashAttention backend calls it."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    head_size = arguments["query"].shape[2]
    return partial(
        flash_attn_varlen_func,
        q=arguments["query"],
        k=arguments["key_cache"],
        v=arguments["value_cache"],
        max_seqlen_q=max_query_len,
        cu_seqlens_q=query_start_loc,
        max_seqlen_k=int(seq_lens.max()),
        seqused_k=seq_lens,
        softmax_scale=head_size**-0.5,
        causal=True,
        block_table=arguments["block_table"],
        fa_version=get_flash_attn_version(head_size=head_size),
    )


# -- tables

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any], str]
"""The heading, what a row has in it (None: nothing), and how that is written."""


def entry(heading: str, key: str, form: str = "") -> Column:
    """What a row has at `key`, if anything."""
    return heading, lambda row: row.get(key), form


def per_least(name: str, form: str = ".2f") -> Column:
    """Bytes of a name, against the least that have to be moved."""
    key = f"{name.replace(' ', '_')}_bytes"
    return f"{name} / least", lambda row: row[key] / row["least_bytes"], form


LEAST: Column = "least MB", lambda row: row["least_bytes"] / 1e6, ",.1f"
OFF = entry("off", "off", ".1e")
STOCK_OFF = entry("stock off", "stock_off", ".1e")
MS = entry("ms", "ms", ".3f")
AGAINST_STOCK = (
    entry("stock ms", "stock_ms", ".3f"),
    entry("ratio", "ratio", ".2f"),
    entry("GB/s", "gb_s", ",.0f"),
)


def table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Columns after the first to the right; those that are empty in all rows are left out."""
    made = Table(header_style="dim", box=None, pad_edge=False)
    cells: list[list[str]] = []
    for heading, value, form in columns:
        values = [value(row) for row in rows]
        if any(one is not None for one in values):
            made.add_column(heading, justify="right" if cells else "left", no_wrap=True)
            cells.append(["" if one is None else format(one, form) for one in values])
    for row_cells in zip(*cells, strict=True):
        made.add_row(*row_cells)
    return made
