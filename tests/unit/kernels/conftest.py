"""Some of these tests run in Triton's interpreter, on the CPU, in a process of their own, for which
`make test-slow` sets TRITON_INTERPRET=1.

`triton.jit` reads it when it decorates, and triton decorates its own library when it is imported.
Another test of a process may have imported it by then, and what vLLM decorates afterwards must not
be interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import sgl_vllm

ROOT = Path(__file__).parents[3]
INTERPRETED = ("test_benchmarks.py", "test_prefix_attention.py")

_is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if (path.name in INTERPRETED) != _is_interpreting
]


def _import_from_the_checkout() -> None:
    """Only an installation gives the folder its name `sgl_vllm.kernels`; and the one that is
    installed may be another checkout's."""
    name, folder = "sgl_vllm.kernels", ROOT / "kernels"
    found = importlib.util.find_spec(name)
    if found is None or found.origin != str(folder / "__init__.py"):
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = sgl_vllm.kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sgl_vllm.kernels)


_import_from_the_checkout()
