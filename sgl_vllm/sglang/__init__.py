"""SGLang's frontend language, for programs written for it: ``import sgl_vllm.sglang as sgl``.

It has SGLang's names, argument spellings, submodules and meanings. The language itself is
`sgl_vllm`, which new programs should import; docs/moving.md says how the two differ.

Owns the table of SGLang's modules. What the names stand for is in the modules beside this one.
"""

import sys as _sys
from importlib import import_module as _import
from types import ModuleType as _ModuleType

from sgl_vllm.lang.api import assistant as assistant
from sgl_vllm.lang.api import assistant_begin as assistant_begin
from sgl_vllm.lang.api import assistant_end as assistant_end
from sgl_vllm.lang.api import separate_reasoning as separate_reasoning
from sgl_vllm.lang.api import system as system
from sgl_vllm.lang.api import system_begin as system_begin
from sgl_vllm.lang.api import system_end as system_end
from sgl_vllm.lang.api import user as user
from sgl_vllm.lang.api import user_begin as user_begin
from sgl_vllm.lang.api import user_end as user_end
from sgl_vllm.lang.media_api import image as image
from sgl_vllm.lang.media_api import video as video
from sgl_vllm.lang.settings import global_config as global_config
from sgl_vllm.lang.settings import set_default_backend as set_default_backend
from sgl_vllm.sglang.backends import Runtime as Runtime
from sgl_vllm.sglang.backends import RuntimeEndpoint as RuntimeEndpoint
from sgl_vllm.sglang.choices import greedy_token_selection as greedy_token_selection
from sgl_vllm.sglang.choices import token_length_normalized as token_length_normalized
from sgl_vllm.sglang.choices import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from sgl_vllm.sglang.functions import flush_cache as flush_cache
from sgl_vllm.sglang.functions import function as function
from sgl_vllm.sglang.functions import gen as gen
from sgl_vllm.sglang.functions import gen_int as gen_int
from sgl_vllm.sglang.functions import gen_string as gen_string
from sgl_vllm.sglang.functions import get_server_info as get_server_info
from sgl_vllm.sglang.functions import select as select
from sgl_vllm.sglang.services import Anthropic as Anthropic
from sgl_vllm.sglang.services import LiteLLM as LiteLLM
from sgl_vllm.sglang.services import OpenAI as OpenAI
from sgl_vllm.sglang.services import VertexAI as VertexAI
from sgl_vllm.version import __version__ as __version__

__all__ = [name for name, value in globals().items() if name[0] != "_" and callable(value)]
__all__ += ["__version__", "global_config"]

# SGLang's modules, and what programs import of them: where it is, and its names there. `A=b` is the
# name A for what is called b there.
_MODULES: dict[str, dict[str, str]] = {
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


def _make(name: str, homes: dict[str, str]) -> None:
    """Register a module of the table as if it had been imported."""
    path = f"{__name__}.{name}"
    module = _sys.modules[path] = _ModuleType(path, f"SGLang's `sglang.{name}`.")
    found = {
        given: getattr(_import(f"sgl_vllm.{home}"), there or given)
        for home, names in homes.items()
        for given, _, there in (one.partition("=") for one in names.split())
    }
    vars(module).update(found, __path__=[], __all__=list(found))
    parent, _, last = path.rpartition(".")
    # `sglang.global_config` is the settings themselves, not the module.
    vars(_sys.modules[parent]).setdefault(last, module)


for _name, _homes in _MODULES.items():
    _make(_name, _homes)

_NOT_HERE = {
    "Engine": "use a server (Runtime), vLLM's own LLM class, or sgl_vllm.Engine as a backend",
    "ServerArgs": "pass the arguments to Runtime",
}


def __getattr__(name: str) -> object:
    """Say what to use instead of SGLang's names that are not part of the language."""
    if name in _NOT_HERE:
        raise AttributeError(f"sgl_vllm.sglang has no {name}: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
