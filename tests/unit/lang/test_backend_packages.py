"""Backends import their packages when they are used, and name a missing one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sgl_vllm as sgl

HEAVY = {"anthropic", "httpx", "litellm", "openai", "pydantic", "tiktoken", "torch", "vllm"}

MAKE_ALL = """
import sys
import sgl_vllm as sgl
sgl.VLLM("http://127.0.0.1:1")
sgl.OpenAI("m"), sgl.Anthropic("m"), sgl.LiteLLM("m"), sgl.Engine("m", plugin=True)
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_nothing_heavy_is_imported_before_a_backend_is_used():
    done = subprocess.run([sys.executable, "-c", MAKE_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(done.stdout.split())


@sgl.function
def ask(s):
    s += sgl.user("Why?") + sgl.assistant(sgl.gen("answer"))


@pytest.mark.parametrize(
    ("backend", "package", "advice"),
    [
        (sgl.Anthropic("m", api_key="k"), "anthropic", r"pip install 'sgl-vllm\[anthropic\]'"),
        (sgl.LiteLLM("m"), "litellm", r"pip install 'sgl-vllm\[litellm\]'"),
        (sgl.Engine("m"), "vllm.engine.arg_utils", "needs vLLM .*sgl-vllm doctor"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch, backend, package, advice):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sgl.ProgramError, match=advice):
        ask.run(backend=backend)
