"""SGLang's frontend language, for programs written for it: ``import sgl_vllm.sglang as sgl``.

It has SGLang's names, argument spellings, submodules and meanings. The language itself is
`sgl_vllm`, which new programs should import; docs/moving.md says how the two differ.

Owns the table of SGLang's modules. What the names stand for is in the modules beside this one.
"""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Mapping
from typing import Any  # Any: the values of modules

from sgl_vllm.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from sgl_vllm.lang.media_api import image, video
from sgl_vllm.lang.settings import global_config
from sgl_vllm.sglang.backends import Runtime, RuntimeEndpoint
from sgl_vllm.sglang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgl_vllm.sglang.functions import (
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    select,
    set_default_backend,
)
from sgl_vllm.sglang.services import Anthropic, LiteLLM, OpenAI, VertexAI
from sgl_vllm.version import __version__

__all__ = [
    "Anthropic",
    "LiteLLM",
    "OpenAI",
    "Runtime",
    "RuntimeEndpoint",
    "VertexAI",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

# SGLang's modules, and what programs import of them: where it is, and its names there. `A=b` is the
# name A for what is called b there.
_MODULES = {
    "api": {"sglang": " ".join(__all__)},
    "global_config": {"lang.settings": "GlobalConfig global_config"},
    "lang": {},
    "lang.api": {"sglang": " ".join(__all__)},
    "lang.backend": {},
    "lang.backend.anthropic": {"sglang.services": "Anthropic"},
    "lang.backend.base_backend": {"sglang.backends": "BaseBackend"},
    "lang.backend.litellm": {"sglang.services": "LiteLLM"},
    "lang.backend.openai": {"sglang.services": "OpenAI TokenUsage"},
    "lang.backend.runtime_endpoint": {"sglang.backends": "Runtime RuntimeEndpoint"},
    "lang.backend.vertexai": {"sglang.services": "VertexAI"},
    "lang.chat_template": {
        "sglang.backends": "ChatTemplate get_chat_template get_chat_template_by_model_path"
    },
    "lang.choices": {
        "sglang.choices": """ChoicesDecision ChoicesSamplingMethod greedy_token_selection
            token_length_normalized unconditional_likelihood_normalized"""
    },
    "lang.interpreter": {"sglang.states": "ProgramState ProgramStateGroup StreamExecutor"},
    "lang.ir": {
        "lang.ir": """SglConstantText=Text SglExpr=Expr SglExprList=ExprList SglGen=Gen
            SglImage=Show SglRoleBegin=RoleBegin SglRoleEnd=RoleEnd SglSelect=Select
            SglVarScopeBegin=VarScopeBegin SglVarScopeEnd=VarScopeEnd SglVariable=Var
            SglVideo=Show""",
        "lang.sampling": "SglSamplingParams=Sampling",
        "sglang.functions": "REGEX_BOOL REGEX_FLOAT REGEX_INT REGEX_STR SglFunction",
    },
    "lang.tracer": {"sglang.functions": "TracedProgram"},
    "srt": {},
    "srt.constrained": {},
    "srt.constrained.outlines_backend": {"sglang.utils": "build_regex_from_object"},
    "srt.hf_transformers_utils": {"sglang.backends": "get_tokenizer"},
    "srt.utils": {"sglang.utils": "load_image"},
    "srt.utils.hf_transformers_utils": {"sglang.backends": "get_tokenizer"},
    "test": {},
    "test.doc_patch": {"sglang.utils": "launch_server_cmd"},
    "test.test_utils": {
        "sglang.utils": """CustomTestCase DEFAULT_MODEL_NAME_FOR_TEST
            DEFAULT_SMALL_MODEL_NAME_FOR_TEST add_common_sglang_args_and_parse
            dump_bench_raw_result is_in_ci select_sglang_backend""",
        "sglang.backends": "BaseBackend RuntimeEndpoint",
        "sglang.services": "OpenAI",
    },
}


class _Module(types.ModuleType):
    """A module of the table, registered as if it had been imported. Its names are found when they
    are used."""

    def __init__(self, name: str, homes: Mapping[str, str]) -> None:
        path = f"{__name__}.{name}"
        super().__init__(path, f"SGLang's `sglang.{name}`.")
        self.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
        self.__path__ = []
        self.homes = {
            given: (home, there or given)
            for home, names in homes.items()
            for given, _, there in (one.partition("=") for one in names.split())
        }
        self.__all__ = sorted(self.homes)
        sys.modules[path] = self
        parent, _, last = path.rpartition(".")
        if parent == __name__:
            globals().setdefault(last, self)  # `sglang.global_config` is the settings themselves
        else:
            sys.modules[parent].add(last, self)

    def add(self, name: str, module: types.ModuleType) -> None:
        """Make a submodule an attribute."""
        setattr(self, name, module)

    def __getattr__(self, name: str) -> Any:
        if name not in self.homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home, there = self.homes[name]
        return getattr(importlib.import_module(f"sgl_vllm.{home}"), there)


for _name, _homes in _MODULES.items():
    _Module(_name, _homes)

_NOT_HERE = {
    "Engine": "use a server (Runtime), vLLM's own LLM class, or sgl_vllm.Engine as a backend",
    "ServerArgs": "pass the arguments to Runtime",
}


def __getattr__(name: str) -> object:
    """Say what to use instead of SGLang's names that are not part of the language."""
    if name in _NOT_HERE:
        raise AttributeError(f"sgl_vllm.sglang has no {name}: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
