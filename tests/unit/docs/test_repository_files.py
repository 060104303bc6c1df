"""What hosting sites and tools read of the repository agrees with the Makefile and the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sgl_vllm.version import __version__

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_hooks_run_the_commands_of_make_check() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    check = MAKEFILE[MAKEFILE.index("\ncheck:") : MAKEFILE.index("\nreference:")]
    commands = re.findall(r'"\$\(BIN\)/(\w+)"(.*)', check)
    assert hooks == [f"{name}{rest}".removesuffix(" .") for name, rest in commands]


def test_the_citation_has_the_version_and_the_paper() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == __version__
    assert "https://arxiv.org/abs/2312.07104" in [one["url"] for one in citation["references"]]
