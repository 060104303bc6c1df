"""`sgl-vllm verify`: the self-check of an engine that serves nothing, and its report."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

from sgl_vllm.commands.arguments import SERVE_FLAGS, argument, check_model_first, option
from sgl_vllm.commands.doctor_model import stay_offline_without_hub
from sgl_vllm.commands.terminal import Misused
from sgl_vllm.preview.outlook import Refused
from sgl_vllm.self_check import offline
from sgl_vllm.self_check.report import CheckReport
from sgl_vllm.vllm_api import versions

DESCRIPTION = """\
Starts an engine with a model and the flags that `vllm serve` would get, and
compares each part of the plugin with stock vLLM on this device: the same
tokens, scores and log-probabilities, and no block lost. It writes what it
finds to sgl-vllm-verify.json and sgl-vllm-verify.txt, which you can attach to
a bug report.

The report contains flags and numbers, no prompts:

    sgl-vllm verify MODEL --dtype bfloat16 --tensor-parallel-size 2

Exit status: 0 if all parts agree; 2, without a report, if there is no vLLM
here or it refuses the model or the flags; 1 otherwise.
"""

PARSING = SERVE_FLAGS
NAME = "sgl-vllm-verify"


def command(
    model: Annotated[str, argument("MODEL", "As for `vllm serve`.")],
    flags: Annotated[
        list[str] | None, argument("[FLAGS ...]", "Further flags of `vllm serve`.")
    ] = None,
    output: Annotated[Path, option("FOLDER", "Where the report is written.")] = Path(),
) -> int:
    check_model_first(model, ("--output",))
    if problem := versions.installation_problem():
        raise Misused(problem)
    output.mkdir(parents=True, exist_ok=True)
    if not os.access(output, os.W_OK):  # checked now, not after minutes
        raise Misused(f"{output} is not writable: choose another --output")
    stay_offline_without_hub(model)
    try:
        report = offline.verify(model, flags or [])
    except Refused as refusal:
        raise Misused(f"not run: {refusal}") from refusal
    except Exception as error:
        traceback.print_exc()
        report = CheckReport(error=f"{type(error).__name__}: {error}")
    for path in write(report, output):
        print(f"sgl-vllm: wrote {path}", file=sys.stderr)
    print(report.to_text(), end="")
    return 0 if report.agrees else 1


def write(report: CheckReport, folder: Path) -> list[Path]:
    """The report as JSON and as text. Returns the files."""
    files = [folder / f"{NAME}.json", folder / f"{NAME}.txt"]
    for path, text in zip(files, (report.to_json() + "\n", report.to_text()), strict=True):
        path.write_text(text)
    return files
