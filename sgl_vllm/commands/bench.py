"""`sgl-vllm bench`: the benchmarks of docs/benchmarks.md, from an installed wheel or a checkout."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

from sgl_vllm import shipped
from sgl_vllm.commands.arguments import argument
from sgl_vllm.commands.examples import print_summaries
from sgl_vllm.commands.terminal import Misused
from sgl_vllm.spelling import did_you_mean
from sgl_vllm.vllm_api import versions

PARSING = {"allow_interspersed_args": False}
PACKAGE = "benchmarks"
DESCRIPTION = """\
Runs a benchmark; `sgl-vllm bench ab ...` is `python -m benchmarks.ab ...` of
the repository. Without a name, lists them. `sgl-vllm bench NAME --help` lists
the arguments of one. Most of them need vLLM in the same environment.
"""


def command(
    words: Annotated[
        list[str] | None, argument("[NAME [ARGUMENTS ...]]", "A benchmark, and its arguments.")
    ] = None,
) -> int:
    found = benchmarks()
    if not words:
        print_summaries(found)
        return 0
    name, *arguments = words
    if name not in found:
        instead = did_you_mean(name, found, f"; there are {', '.join(found)}")
        raise Misused(f"unknown benchmark {name}{instead}")
    return run(name, arguments)


def benchmarks() -> dict[str, Path]:
    """The modules that can be run, by name. A package runs by its `__main__.py`."""
    folder = shipped.folder() / PACKAGE
    files = sorted([*folder.glob("*.py"), *folder.glob("*/__main__.py")])
    runnable = [file for file in files if '__name__ == "__main__"' in file.read_text("utf-8")]
    by_name = {
        file.parent.name if file.stem == "__main__" else file.stem: file for file in runnable
    }
    return dict(sorted(by_name.items()))


def run(name: str, arguments: list[str]) -> int:
    """Runs one as `python -m` would, in this process.

    Returns:
        0 if it ends by itself, 1 if it needs a package that is missing. A benchmark that fails
        raises SystemExit with its status.
    """
    folder = str(shipped.folder())
    sys.path.insert(0, folder)
    # Some run parts of themselves as processes of their own.
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.argv = [f"{PACKAGE}.{name}", *arguments]
    try:
        runpy.run_module(f"{PACKAGE}.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        print(f"sgl-vllm bench {name}: {_remedy(error)}", file=sys.stderr)
        return 1
    return 0


def _remedy(error: ModuleNotFoundError) -> str:
    if versions.installed_vllm() is None:  # it brings most of what benchmarks import
        return versions.unsupported_message(None) or ""
    missing = (error.name or "").partition(".")[0]
    return f"it needs {missing}: pip install {missing}"
