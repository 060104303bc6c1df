"""`sgl-vllm verify`: the longer self-check, and its report. The work is `self_check.offline`'s."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from sgl_vllm.commands.arguments import positive
from sgl_vllm.preview.refusal import Refused
from sgl_vllm.self_check.report import CheckReport
from sgl_vllm.vllm_api import versions

DESCRIPTION = """\
Starts an engine with a model and the flags that `vllm serve` would get, and
compares each part of the plugin with stock vLLM on this device: the same
tokens, scores and log-probabilities, no block lost, and how long it takes.
It writes what it finds to sgl-vllm-verify.json and sgl-vllm-verify.txt, which
you can attach to a bug report. They contain flags and numbers, no prompts.

    sgl-vllm verify MODEL --dtype bfloat16 --tensor-parallel-size 2

Exit status: 0 if all parts agree; 2, without a report, if there is no vLLM here
or it refuses the model or the flags; 1 otherwise.
"""

NAME = "sgl-vllm-verify"


def declare(command: argparse.ArgumentParser) -> None:
    command.usage = "%(prog)s [--output FOLDER] [--rounds N] MODEL [FLAGS ...]"
    command.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="for the report (default: the current one)",
    )
    command.add_argument(
        "--rounds",
        type=positive(int),
        default=5,
        metavar="N",
        help="how many times each comparison runs (default: 5)",
    )
    command.add_argument("model", metavar="MODEL", help="as for `vllm serve`")
    flags = command.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="further flags of `vllm serve`"
    )
    flags.required = False  # argparse counts them as missing together with MODEL


def main(options: argparse.Namespace) -> int:
    if problem := versions.installation_problem():
        print(f"sgl-vllm verify: {problem}", file=sys.stderr)
        return 2
    from sgl_vllm.self_check import offline  # imports vLLM, which takes seconds

    try:
        report = offline.verify(options.model, options.flags, options.rounds)
    except Refused as refusal:
        print(f"sgl-vllm verify: not run: {refusal}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        report = CheckReport(error=f"{type(error).__name__}: {error}")
    for path in write(report, options.output):
        print(f"sgl-vllm: wrote {path}", file=sys.stderr)
    print(report.to_text(), end="")
    return 0 if report.agrees else 1


def write(report: CheckReport, folder: Path) -> list[Path]:
    """The report as JSON and as text. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{NAME}.json", folder / f"{NAME}.txt"]
    for path, text in zip(files, (report.to_json() + "\n", report.to_text()), strict=True):
        path.write_text(text)
    return files
