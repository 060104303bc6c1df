"""SGLang's modules and names, as its programs import them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import sgl_vllm as core
import sgl_vllm.sglang as sgl

SUBMODULES = {
    "api": "function gen set_default_backend RuntimeEndpoint OpenAI global_config",
    "global_config": "global_config",
    "lang.api": "function gen gen_int gen_string select set_default_backend Runtime",
    "lang.ir": "REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglGen SglExprList SglFunction",
    "lang.chat_template": "get_chat_template get_chat_template_by_model_path ChatTemplate",
    "lang.choices": "greedy_token_selection token_length_normalized ChoicesSamplingMethod "
    "unconditional_likelihood_normalized ChoicesDecision",
    "lang.interpreter": "ProgramState ProgramStateGroup StreamExecutor",
    "lang.backend.base_backend": "BaseBackend",
    "lang.backend.runtime_endpoint": "RuntimeEndpoint Runtime",
    "lang.backend.openai": "OpenAI TokenUsage",
    "lang.backend.anthropic": "Anthropic",
    "lang.backend.litellm": "LiteLLM",
    "lang.backend.vertexai": "VertexAI",
    "utils": "read_jsonl dump_state_text download_and_cache_file http_request wait_for_server "
    "print_highlight terminate_process launch_server_cmd",
    "test.test_utils": "add_common_sglang_args_and_parse select_sglang_backend CustomTestCase "
    "DEFAULT_MODEL_NAME_FOR_TEST dump_bench_raw_result",
    "test.doc_patch": "launch_server_cmd",
}


@pytest.mark.parametrize("module", SUBMODULES)
def test_a_submodule_has_sglangs_names(module: str) -> None:
    found = importlib.import_module(f"sgl_vllm.sglang.{module}")
    assert [name for name in SUBMODULES[module].split() if not hasattr(found, name)] == []


def test_every_public_name_is_there() -> None:
    assert [name for name in sgl.__all__ if not hasattr(sgl, name)] == []


def test_importing_it_loads_neither_vllm_nor_torch_nor_a_services_client() -> None:
    code = (
        "import sys, sgl_vllm.sglang.api, sgl_vllm.sglang.test.test_utils; "
        "print({'vllm', 'torch', 'openai', 'anthropic', 'litellm'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "set()", ran.stderr


def test_the_settings_are_those_of_the_language() -> None:
    assert sgl.global_config is core.global_config


@pytest.mark.parametrize("name", ["Engine", "ServerArgs"])
def test_what_is_no_part_of_the_language_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=r"sgl_vllm.sglang has no .*: (use|pass)"):
        getattr(sgl, name)


def test_patterns_are_sglangs() -> None:
    ir = importlib.import_module("sgl_vllm.sglang.lang.ir")

    assert (ir.REGEX_INT, ir.REGEX_BOOL) == (r"[-+]?[0-9]+[ \n]*", "(True|False)")
    assert ir.REGEX_FLOAT == r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
    assert ir.REGEX_STR == r"\"[\w\d\s]*\""
