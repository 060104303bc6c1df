"""The package's long description: README.md with links that also work on a package index.

Everything else about the package is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_TARGET = re.compile(r"(?P<before>\]\(|\b(?:href|src)=\")(?![a-z]+:|#|//)(?P<path>[^)\"\s]+)")


def long_description() -> str:
    """README.md, its relative links and images at the address of the sources of this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "sgl_vllm" / "version.py").read_text("utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    assert found is not None
    source, version = project["urls"]["Source"], found.group(1)

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["path"].endswith((".svg", ".png", ".gif")) else "blob"
        return f"{link['before']}{source}/{kind}/v{version}/{link['path']}"

    return _TARGET.sub(absolute, (ROOT / "README.md").read_text("utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
