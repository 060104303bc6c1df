"""SGLang's modules and names, as its programs import them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import sgl_vllm.sglang as sgl


def test_every_name_of_the_table_is_there() -> None:
    assert [name for name in sgl.__all__ if not hasattr(sgl, name)] == []
    for path in sgl._MODULES:
        found = importlib.import_module(f"sgl_vllm.sglang.{path}")
        assert [name for name in found.__all__ if not hasattr(found, name)] == []


def test_submodules_are_imported_as_programs_do() -> None:
    code = """
import sgl_vllm.sglang as sgl
from sgl_vllm.sglang import RuntimeEndpoint
from sgl_vllm.sglang.lang import ir
from sgl_vllm.sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as same
from sgl_vllm.sglang.test.test_utils import *
import sgl_vllm.sglang.lang.chat_template as templates
assert RuntimeEndpoint is same and ir.SglGen and templates.get_chat_template("x")
assert sgl.lang.ir is ir and is_in_ci() is False
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_loads_neither_vllm_nor_torch_nor_a_services_client() -> None:
    code = (
        "import sys, sgl_vllm.sglang.api, sgl_vllm.sglang.test.test_utils; "
        "print({'vllm', 'torch', 'openai', 'anthropic', 'litellm'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "set()", ran.stderr


@pytest.mark.parametrize("name", ["Engine", "ServerArgs"])
def test_what_is_no_part_of_the_language_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=r"sgl_vllm.sglang has no .*: (use|pass)"):
        getattr(sgl, name)


def test_patterns_are_sglangs() -> None:
    ir = importlib.import_module("sgl_vllm.sglang.lang.ir")
    assert (ir.REGEX_INT, ir.REGEX_BOOL) == (r"[-+]?[0-9]+[ \n]*", "(True|False)")
    assert ir.REGEX_FLOAT == r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
    assert ir.REGEX_STR == r"\"[\w\d\s]*\""
