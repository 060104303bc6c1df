"""SGLang's ideas in an unforked vLLM; this module is the language: ``import sgl_vllm as sgl``.

Imports neither vLLM nor torch: it is the client, and runs where no server is installed.
"""

from typing import TYPE_CHECKING, Any

from sgl_vllm.lang.backends.anthropic_service import Anthropic
from sgl_vllm.lang.backends.base import Backend, ServerInfo, Usage
from sgl_vllm.lang.backends.engine import Engine
from sgl_vllm.lang.backends.litellm_service import LiteLLM
from sgl_vllm.lang.backends.openai_service import OpenAI
from sgl_vllm.lang.backends.replay import Recorder, Replay
from sgl_vllm.lang.backends.vllm import VLLM, RuntimeEndpoint
from sgl_vllm.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgl_vllm.lang.errors import BackendError, ProgramCancelled, ProgramError, UnsupportedError
from sgl_vllm.lang.ir import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    tool,
    user,
    user_begin,
    user_end,
    var,
    video,
)
from sgl_vllm.lang.program import (
    Program,
    flush_cache,
    function,
    get_server_info,
    set_default_backend,
)
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.state import AsyncProgramState, ProgramGroup, ProgramState
from sgl_vllm.lang.tracing.frames import TraceError
from sgl_vllm.lang.view import fork_tree_svg, live, show, to_html, to_page

if TYPE_CHECKING:
    from sgl_vllm.lang.compiler import CompiledProgram, ReorderError, model_planner

__version__ = "0.1.0"

__all__ = [
    "VLLM",
    "Anthropic",
    "AsyncProgramState",
    "Backend",
    "BackendError",
    "CompiledProgram",
    "Engine",
    "LiteLLM",
    "OpenAI",
    "Program",
    "ProgramCancelled",
    "ProgramError",
    "ProgramGroup",
    "ProgramState",
    "Recorder",
    "ReorderError",
    "Replay",
    "RuntimeEndpoint",
    "ServerInfo",
    "TraceError",
    "UnsupportedError",
    "Usage",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "fork_tree_svg",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "live",
    "model_planner",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "show",
    "system",
    "system_begin",
    "system_end",
    "to_html",
    "to_page",
    "token_length_normalized",
    "tool",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "var",
    "video",
]


def __getattr__(name: str) -> Any:
    """What few programs use is loaded when it is used."""
    if name in ("CompiledProgram", "ReorderError", "model_planner"):
        from sgl_vllm.lang import compiler

        return getattr(compiler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
