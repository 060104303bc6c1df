"""SGLang's frontend language, for programs written for it: ``import sgl_vllm.sglang as sgl``.

It has SGLang's names, argument spellings, submodules and meanings. The language itself is
`sgl_vllm`, which new programs should import; docs/moving.md says how the two differ.

Owns the table of SGLang's modules. What the names stand for is in the modules beside this one.
"""

import importlib
import importlib.machinery
import sys
import types

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

_FUNCTIONS = """assistant assistant_begin assistant_end flush_cache function gen gen_int gen_string
    get_server_info image select separate_reasoning set_default_backend system system_begin
    system_end user user_begin user_end video"""
_BACKENDS = "Anthropic LiteLLM OpenAI Runtime RuntimeEndpoint VertexAI"

# SGLang's modules, and what programs import of them: where it is, and its names there. `A=b` is the
# name A for what is called b there.
_MODULES = {
    "api": {"sglang": f"{_FUNCTIONS} {_BACKENDS} global_config"},
    "global_config": {"lang.settings": "GlobalConfig global_config"},
    "lang": {},
    "lang.api": {"sglang": f"{_FUNCTIONS} Runtime"},
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
        "sglang.choices": """ChoicesDecision ChoicesSamplingMethod GreedyTokenSelection
            TokenLengthNormalized UnconditionalLikelihoodNormalized greedy_token_selection
            token_length_normalized unconditional_likelihood_normalized"""
    },
    "lang.interpreter": {"sglang.states": "ProgramState ProgramStateGroup StreamExecutor"},
    "lang.ir": {
        "lang.ir": """SglConstantText=Text SglExpr=Expr SglExprList=ExprList SglGen=Gen
            SglImage=Show SglRoleBegin=RoleBegin SglRoleEnd=RoleEnd SglSelect=Select
            SglVarScopeBegin=VarScopeBegin SglVarScopeEnd=VarScopeEnd SglVariable=Var
            SglVideo=Show""",
        "lang.sampling": "SglSamplingParams=Sampling",
        "sglang.programs": "REGEX_BOOL REGEX_FLOAT REGEX_INT REGEX_STR SglFunction",
    },
    "lang.tracer": {"sglang.programs": "LastNode TracedProgram"},
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
            dump_bench_raw_result is_in_ci
            select_sglang_backend""",
        "sglang.backends": "BaseBackend RuntimeEndpoint",
        "sglang.services": "OpenAI",
    },
}


class _Module(types.ModuleType):
    """A module of the table, whose names are found when they are first used."""

    __all__: list[str]
    homes: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> object:
        if name not in self.homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home, there = self.homes[name]
        value: object = getattr(importlib.import_module(f"sgl_vllm.{home}"), there)
        setattr(self, name, value)
        return value

    def add(self, name: str, module: types.ModuleType) -> None:
        """Make a submodule an attribute."""
        setattr(self, name, module)


_made: dict[str, _Module] = {}


def _make(name: str) -> None:
    """Register one module of the table as if it had been imported."""
    path = f"{__name__}.{name}"
    module = _Module(path, f"SGLang's `sglang.{name}`.")
    module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
    module.__path__ = []
    module.homes = {}
    for home, names in _MODULES[name].items():
        for one in names.split():
            given, _, there = one.partition("=")
            module.homes[given] = (home, there or given)
    module.__all__ = sorted(module.homes)
    sys.modules[path] = module
    parent, _, last = name.rpartition(".")
    if parent:
        _made[parent].add(last, module)
    else:
        globals().setdefault(last, module)  # `sglang.global_config` is the settings themselves
    _made[name] = module


for _name in _MODULES:
    _make(_name)

_NOT_HERE = {
    "Engine": "use a server (Runtime), vLLM's own LLM class, or sgl_vllm.Engine as a backend",
    "ServerArgs": "pass the arguments to Runtime",
}


def __getattr__(name: str) -> object:
    """Say what to use instead of SGLang's names that are not part of the language."""
    if name in _NOT_HERE:
        raise AttributeError(f"sgl_vllm.sglang has no {name}: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
