"""The Triton kernels against what vLLM does instead, one layer at a time.

    python -m benchmarks.kernels [KERNEL ...] [--json FILE] [--explain]

    prefix_decode   decode of requests that share KV, against FlashAttention

Times need CUDA. Without it the command shows the bytes that each case moves, counted, and how far
results are off on a small case in Triton's interpreter. `--explain` says what the columns are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console

from benchmarks.command import check_folders, versions
from benchmarks.kernels import device, prefix_decode
from sgl_vllm.commands.terminal import WIDTH_OF_FILES

KERNELS: dict[str, ModuleType] = {"prefix_decode": prefix_decode}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="all of them if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--explain", action="store_true", help="say what the columns are")
    arguments = parser.parse_args(argv)
    if unknown := sorted({*arguments.kernels} - {*KERNELS}):
        parser.error(f"no kernel named {', '.join(unknown)}: there are {', '.join(KERNELS)}")
    try:
        check_folders(json=arguments.json, data=None)
    except ValueError as error:
        parser.error(str(error))
    has_cuda = device.prepare()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    name = torch.cuda.get_device_name() if has_cuda else None
    console.print(name or device.NO_CUDA)
    rows = {}
    for kernel in arguments.kernels or KERNELS:
        module = KERNELS[kernel]
        rows[kernel] = [module.measure(case, has_cuda) for case in module.CASES]
        console.print(f"\n[bold]{kernel}[/bold]: {(module.__doc__ or '').splitlines()[0]}")
        if arguments.explain:
            console.print((module.__doc__ or "").partition("\n\n")[2])
        console.print(device.table(rows[kernel], module.COLUMNS))
    if arguments.json:
        content = {"device": name, "versions": versions("torch", "triton"), "kernels": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
