"""What `import sgl_vllm as sgl` offers: the names of the language.

It imports neither vLLM nor torch, so that programs run where no server is installed.
"""

from typing import TYPE_CHECKING

from sgl_vllm.lang.api import (
    any_order,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    read_only_tool,
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
)
from sgl_vllm.lang.backends.anthropic_service import Anthropic
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.combined import Combined
from sgl_vllm.lang.backends.engine import Engine
from sgl_vllm.lang.backends.litellm_service import LiteLLM
from sgl_vllm.lang.backends.openai_service import OpenAI
from sgl_vllm.lang.backends.replay import Recorder, Replay
from sgl_vllm.lang.backends.requests import ServerInfo
from sgl_vllm.lang.backends.vllm import VLLM, RuntimeEndpoint
from sgl_vllm.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgl_vllm.lang.errors import BackendError, ProgramCancelled, ProgramError, UnsupportedError
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.media_api import audio, image, picture, speech, transcribe, video
from sgl_vllm.lang.primitives import (
    ToolCall,
    agent,
    best_of,
    judge,
    map_reduce,
    retry_until,
    vote,
)
from sgl_vllm.lang.program import CompiledProgram, Program, ProgramWithOptions, function
from sgl_vllm.lang.settings import (
    flush_cache,
    get_server_info,
    global_config,
    set_default_backend,
)
from sgl_vllm.lang.state import AsyncProgramState, ProgramState
from sgl_vllm.lang.tracing.errors import TraceError
from sgl_vllm.lang.transcript import Order
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.view import fork_tree_svg, live, show, to_html, to_page, why

if TYPE_CHECKING:
    from sgl_vllm.lang.planner import model_planner
    from sgl_vllm.lang.reordering import ReorderError

__all__ = [
    "VLLM",
    "Anthropic",
    "AsyncProgramState",
    "Backend",
    "BackendError",
    "Combined",
    "CompiledProgram",
    "Engine",
    "LiteLLM",
    "Media",
    "OpenAI",
    "Order",
    "Program",
    "ProgramCancelled",
    "ProgramError",
    "ProgramGroup",
    "ProgramState",
    "ProgramWithOptions",
    "Recorder",
    "ReorderError",
    "Replay",
    "RuntimeEndpoint",
    "ServerInfo",
    "ToolCall",
    "TraceError",
    "UnsupportedError",
    "Usage",
    "agent",
    "any_order",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "audio",
    "best_of",
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
    "judge",
    "live",
    "map_reduce",
    "model_planner",
    "picture",
    "read_only_tool",
    "retry_until",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "show",
    "speech",
    "system",
    "system_begin",
    "system_end",
    "to_html",
    "to_page",
    "token_length_normalized",
    "tool",
    "transcribe",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "var",
    "video",
    "vote",
    "why",
]


def __getattr__(name: str) -> object:
    """Import what few programs use when it is used."""
    if name == "model_planner":
        from sgl_vllm.lang import planner

        return planner.model_planner
    if name == "ReorderError":
        from sgl_vllm.lang import reordering

        return reordering.ReorderError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
