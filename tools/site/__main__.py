"""Builds the documentation site: `make site`, or `python -m tools.site [--output FOLDER]`.

Owns what is where in the output:

    index.html                     the versions that the folder has
    0.1.0/docs/index.html          the start page of one version

Folders of other versions in the output stay, so a release is published by building into a copy of
what is published already. A warning of Sphinx, such as a broken link, is an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import InvalidVersion, Version

from sgl_vllm.version import __version__

ROOT = Path(__file__).resolve().parents[2]
START_PAGE = "docs/index.html"

REDIRECT = f"""\
<!DOCTYPE html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={START_PAGE}">
<title>sgl-vllm</title>
<a href="{START_PAGE}">sgl-vllm</a>
"""
VERSIONS = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Versions of sgl-vllm</title>
<link rel="icon" href="data:,">
<style>body {{ font: 1rem/1.6 system-ui, sans-serif; margin: 2rem; }}</style>
<h1>Documentation of sgl-vllm</h1>
<ul>
{items}
</ul>
"""


def build(output: Path) -> int:
    """Write this version's folder and the list of versions. The exit status is Sphinx's."""
    from sphinx.cmd.build import build_main

    folder = output / __version__
    shutil.rmtree(folder, ignore_errors=True)  # pages that are no more
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    config = ["--conf-dir", str(ROOT / "tools" / "site")]
    with TemporaryDirectory() as parsed:  # what is kept of an earlier build hides its warnings
        options = [*strict, *config, "--doctree-dir", parsed]
        if status := build_main([*options, str(ROOT), str(folder)]):
            return status
    (folder / "index.html").write_text(REDIRECT)
    (output / "index.html").write_text(versions_page(output))
    return 0


def versions_page(output: Path) -> str:
    """The list of the versions in the folder, newest first."""
    items = (
        f'<li><a href="{escape(name)}/{START_PAGE}">{escape(name)}</a></li>'
        for name in versions_in(output)
    )
    return VERSIONS.format(items="\n".join(items))


def versions_in(output: Path) -> list[str]:
    """The names of the folders that hold a version, newest first."""
    found = []
    for start_page in output.glob(f"*/{START_PAGE}"):
        name = start_page.relative_to(output).parts[0]
        try:
            found.append((Version(name), name))
        except InvalidVersion:
            continue
    return [name for _, name in sorted(found, reverse=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="default: site/")
    output = parser.parse_args().output
    status = build(output)
    if status == 0:
        print(f"open {output / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
