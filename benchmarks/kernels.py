"""The Triton kernel for decode of requests that share KV, against vLLM's FlashAttention.

    python -m benchmarks.kernels [--json FILE]

Times need CUDA. Without it the command shows the bytes that each case moves, counted, and how far
results are off on a small case in Triton's interpreter.

A case is one layer of a decode step: so many requests with one query token each, the tokens that
groups of them share, level by level, and the tokens of their own. *least* is what has to be moved:
the KV of each distinct token, each query and each result, once; *one by one / least* is what stock
asks for, *kernel / least* what this kernel's programs ask for, their partial results included.
What several tiles of one group read after the first is mostly met by the L2 cache. *pays* is what
the plan's cost rule says: where it is "no", a server would call stock. *plan us* is the making of
the plan, once a step for all layers, on this machine's CPU.

With CUDA: *stock* is `flash_attn_varlen_func` with a block table, as vLLM calls it for decode;
*ratio* is stock ms / ms, above 1 this kernel is faster; *GB/s* is least / ms. The cost rule is
right where "no" goes with a ratio below 1. *off* is the largest absolute difference from the
reference in plain PyTorch, over up to 8 requests, *stock off* FlashAttention's.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import figures_table, parser_of, versions, write_json
from sgl_vllm.commands.terminal import WIDTH_OF_FILES

NO_CUDA = (
    "Times need a CUDA device, and there is none here: below are the bytes of each case, counted, "
    "and how far results are off on a small case of its kind in Triton's interpreter."
)
PLANS_TIMED = 7
REQUESTS_COMPARED = 8


@dataclass(frozen=True)
class Case:
    """`levels` has (tokens, number of groups that share them), from the root down: with
    ((8192, 1), (1024, 8)) all share 8,192 tokens, and each eighth of them the next 1,024."""

    num_requests: int
    levels: tuple[tuple[int, int], ...]
    own_tokens: int = 256
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        shared = [
            f"{tokens:,}" if groups == 1 else f"{groups} x {tokens:,}"
            for tokens, groups in self.levels
        ]
        name = " + ".join((*shared, f"{self.num_requests} x {self.own_tokens:,}"))
        if self.num_heads != 4 * self.num_kv_heads:
            name += f", {self.num_heads} / {self.num_kv_heads} heads"
        return name if self.block_size == 16 else f"{name}, blocks of {self.block_size}"

    def small(self) -> Case:
        """Of its kind: the same heads to a KV head, lengths and head size a small part."""
        return replace(
            self,
            num_requests=min(self.num_requests, 6),
            levels=tuple(
                (tokens and 16 + tokens // 512, min(groups, 2)) for tokens, groups in self.levels
            ),
            own_tokens=self.own_tokens // 16,
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_size=32,
        )


CASES = (
    Case(64, ((8192, 1),)),
    *(
        Case(count, ((shared, 1),))
        for shared, count in product((0, 512, 2048), (1, 4, 16, 64, 256))
    ),
    *(Case(count, ((8192, 1),)) for count in (1, 2, 4, 16, 256)),
    *(Case(count, ((32768, 1),)) for count in (1, 4, 16, 64, 256)),
    Case(64, ((8192, 1), (1024, 8))),
    Case(256, ((2048, 1), (2048, 16))),
    Case(256, ((32768, 1), (512, 32))),
    Case(64, ((8192, 8),)),
    Case(64, ((8192, 1),), own_tokens=4096),
    Case(64, ((8192, 1),), num_heads=28, num_kv_heads=4),
    Case(64, ((8192, 1),), num_heads=32, num_kv_heads=32),
    Case(64, ((8192, 1),), block_size=48),
)
"""The first is the one that the kernel is meant for."""


# -- what is asked


def tables_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Block table and lengths; requests of a group are not neighbours, blocks in random order."""
    rng = np.random.default_rng(0)
    size, count = case.block_size, case.num_requests
    request = np.arange(count)
    parts, used = [], 0
    for tokens, groups in case.levels:
        # Only whole blocks are shared: what is left over belongs to the part below.
        num_blocks = tokens // size
        parts.append(used + (request % groups)[:, None] * num_blocks + np.arange(num_blocks))
        used += groups * num_blocks
    length = sum(tokens for tokens, _ in case.levels) + case.own_tokens
    num_own = -(-length // size) - sum(part.shape[1] for part in parts)
    parts.append(used + request[:, None] * num_own + np.arange(num_own))
    used += count * num_own
    table = rng.permutation(used)[np.concatenate(parts, axis=1)]
    return rng.permutation(table).astype(np.int32), np.full(count, length, dtype=np.int32)


def arguments_of(case: Case, table: np.ndarray, device: str) -> dict[str, torch.Tensor]:
    """Of the kernel, but for plan and lengths. The layout is vLLM's NHD."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device, dtype=case.dtype)
    num_blocks, d = int(table.max()) + 1, case.head_size
    kv_cache = normal(num_blocks, case.block_size, case.num_kv_heads, 2 * d)
    key_cache, value_cache = kv_cache.split(d, dim=-1)
    return {
        "query": normal(case.num_requests, case.num_heads, d),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": torch.from_numpy(table).to(device),
    }


# -- what it costs


def distinct_tokens(table: np.ndarray, lengths: np.ndarray, block_size: int) -> int:
    """With a KV of their own in the cache, of all requests together."""
    filled = np.minimum(lengths[:, None] - np.arange(table.shape[1]) * block_size, block_size)
    most = np.zeros(int(table.max()) + 1, dtype=np.int64)
    np.maximum.at(most, table, np.maximum(filled, 0))
    return int(most.sum())


def measure(case: Case, has_cuda: bool) -> dict[str, Any]:
    """One case: its bytes, how far off its results are, and with CUDA its times and stock's."""
    from sgl_vllm.kernels import prefix_levels, prefix_plan
    from sgl_vllm.kernels.prefix_attention import DevicePlan, prefix_decode_attention

    table, lengths = tables_of(case)
    shape = _shape_of(case)
    plan_s = []
    for _ in range(PLANS_TIMED):
        begun = time.perf_counter()
        pays = prefix_plan.make_plan(table, lengths, shape) is not None
        plan_s.append(time.perf_counter() - begun)
    plan = prefix_plan.build_plan(table, lengths, shape)
    ends = 2 * case.num_requests * case.num_heads * case.head_size * shape.itemsize_bytes
    least = distinct_tokens(table, lengths, case.block_size) * shape.kv_bytes_per_token + ends
    row: dict[str, Any] = {
        "case": case.name,
        "least_bytes": least,
        "one_by_one_bytes": plan.kv_bytes_read_ungrouped + ends,
        "kernel_bytes": plan.kv_bytes_read + plan.partial_bytes + ends,
        "num_segments": plan.num_segments,
        "num_programs": len(plan.items) * case.num_kv_heads,
        "pays": pays,
        "plan_us": 1e6 * statistics.median(plan_s),
    }

    run, device = (case, "cuda") if has_cuda else (case.small(), "cpu")
    if not has_cuda:
        table, lengths = tables_of(run)
        plan = prefix_plan.build_plan(table, lengths, _shape_of(run), prefix_levels.FREE)
    arguments = arguments_of(run, table, device)
    seq_lens = torch.from_numpy(lengths).to(device)
    on_device = DevicePlan.upload(plan, device)
    call = partial(prefix_decode_attention, **arguments, seq_lens=seq_lens, plan=on_device)
    row["off"] = _off(call(), arguments, seq_lens)
    if has_cuda:
        starts = torch.arange(run.num_requests + 1, dtype=torch.int32, device="cuda")
        stock = flash_attention(arguments, starts, seq_lens)
        row["stock_off"] = _off(stock(), arguments, seq_lens)
        ms, stock_ms = milliseconds(call), milliseconds(stock)
        row |= {"ms": ms, "stock_ms": stock_ms, "ratio": stock_ms / ms, "gb_s": least / ms / 1e6}
    return row


def _shape_of(case: Case) -> Any:
    from sgl_vllm.kernels.prefix_levels import AttentionShape

    return AttentionShape(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        itemsize_bytes=case.dtype.itemsize,
        block_size_tokens=case.block_size,
    )


def _off(result: torch.Tensor, arguments: dict[str, torch.Tensor], seq_lens: torch.Tensor) -> float:
    from sgl_vllm.kernels.reference import decode_attention

    some = slice(None, None, -(-len(seq_lens) // REQUESTS_COMPARED))
    expected = decode_attention(
        arguments["query"][some],
        arguments["key_cache"],
        arguments["value_cache"],
        arguments["block_table"][some],
        seq_lens[some],
        scale=result.shape[2] ** -0.5,
    )
    return float((result[some].float() - expected).abs().max())


# -- the device


def prepare() -> bool:
    """Whether there is a CUDA device; without one, Triton interprets what is imported from now on.

    Raises:
        RuntimeError: Triton was already imported, so its interpreter cannot be chosen any more.
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


def flash_attention(
    arguments: Mapping[str, torch.Tensor], query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """vLLM's attention over a paged cache, as its FlashAttention backend calls it for decode."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    head_size = arguments["query"].shape[2]
    return partial(
        flash_attn_varlen_func,
        q=arguments["query"],
        k=arguments["key_cache"],
        v=arguments["value_cache"],
        max_seqlen_q=1,
        cu_seqlens_q=query_start_loc,
        max_seqlen_k=int(seq_lens.max()),
        seqused_k=seq_lens,
        softmax_scale=head_size**-0.5,
        causal=True,
        block_table=arguments["block_table"],
        fa_version=get_flash_attn_version(head_size=head_size),
    )


# -- the command


def table(rows: Sequence[Mapping[str, Any]], has_cuda: bool) -> Table:
    headings = ("least MB", "one by one / least", "kernel / least", "pays", "plan us", "off")
    of_cuda = ("stock off", "ms", "stock ms", "ratio", "GB/s") if has_cuda else ()
    made = figures_table("shared + own tokens", *headings, *of_cuda)
    for row in rows:
        least = row["least_bytes"]
        cells = [
            row["case"],
            f"{least / 1e6:,.1f}",
            f"{row['one_by_one_bytes'] / least:.2f}",
            f"{row['kernel_bytes'] / least:.2f}",
            "yes" if row["pays"] else "no",
            f"{row['plan_us']:,.0f}",
            f"{row['off']:.1e}",
        ]
        if has_cuda:
            cells += [f"{row['stock_off']:.1e}", f"{row['ms']:.3f}", f"{row['stock_ms']:.3f}"]
            cells += [f"{row['ratio']:.2f}", f"{row['gb_s']:,.0f}"]
        made.add_row(*cells)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = parser_of("kernels", __doc__).parse_args(argv)
    has_cuda = prepare()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    name = torch.cuda.get_device_name() if has_cuda else None
    console.print(name or NO_CUDA)
    rows = [measure(case, has_cuda) for case in CASES]
    console.print(table(rows, has_cuda))
    found = {"device": name, "versions": versions("torch", "triton")}
    write_json(arguments.json, {**found, "kernels": {"prefix_decode": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
