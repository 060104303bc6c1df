"""What hosting sites read of the repository agrees with the package."""

from __future__ import annotations

import yaml

from sgl_vllm.version import __version__
from tools.generated import ROOT


def test_the_citation_has_the_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert "https://arxiv.org/abs/2312.07104" in [one["url"] for one in citation["references"]]
