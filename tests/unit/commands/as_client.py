"""Runs command lines of `sgl-vllm` as where only the client's packages are installed.

    python -m tests.unit.commands.as_client '["verify x", ...]'

Prints a list with the exit status, standard output and standard error of each, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OF_THE_SERVER = """
    huggingface_hub interegular llguidance matplotlib msgspec numba numpy outlines_core pandas PIL
    prometheus_fastapi_instrumentator pyarrow ray safetensors scipy tokenizers torch transformers
    triton vllm xgrammar yaml zmq
"""
HIDDEN = OF_THE_SERVER.split()


class OfTheClient(PathFinder):
    """Finds no package of the server's."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_hidden = fullname.partition(".")[0] in HIDDEN
        return None if is_hidden else super().find_spec(fullname, path, target)


def run(words: list[str]) -> tuple[int | None, str, str]:
    from sgl_vllm.commands import cli

    printed, errors = io.StringIO(), io.StringIO()
    status = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = cli.main(words)
        except BaseException:
            traceback.print_exc()
    return status, printed.getvalue(), errors.getvalue()


if __name__ == "__main__":
    sys.meta_path[:] = [OfTheClient if finder is PathFinder else finder for finder in sys.meta_path]
    print(json.dumps([run(words.split()) for words in json.loads(sys.argv[1])]))
