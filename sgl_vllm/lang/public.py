"""What `import sgl_vllm as sgl` offers: the names of the language.

It imports neither vLLM nor torch, so that programs run where no server is installed.
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING

from sgl_vllm.lang.api import any_order as any_order
from sgl_vllm.lang.api import assistant as assistant
from sgl_vllm.lang.api import assistant_begin as assistant_begin
from sgl_vllm.lang.api import assistant_end as assistant_end
from sgl_vllm.lang.api import gen as gen
from sgl_vllm.lang.api import gen_int as gen_int
from sgl_vllm.lang.api import gen_string as gen_string
from sgl_vllm.lang.api import read_only_tool as read_only_tool
from sgl_vllm.lang.api import select as select
from sgl_vllm.lang.api import separate_reasoning as separate_reasoning
from sgl_vllm.lang.api import system as system
from sgl_vllm.lang.api import system_begin as system_begin
from sgl_vllm.lang.api import system_end as system_end
from sgl_vllm.lang.api import tool as tool
from sgl_vllm.lang.api import user as user
from sgl_vllm.lang.api import user_begin as user_begin
from sgl_vllm.lang.api import user_end as user_end
from sgl_vllm.lang.api import var as var
from sgl_vllm.lang.backends.anthropic_service import Anthropic as Anthropic
from sgl_vllm.lang.backends.base import Backend as Backend
from sgl_vllm.lang.backends.base import Combined as Combined
from sgl_vllm.lang.backends.engine import Engine as Engine
from sgl_vllm.lang.backends.openai_service import LiteLLM as LiteLLM
from sgl_vllm.lang.backends.openai_service import OpenAI as OpenAI
from sgl_vllm.lang.backends.replay import Recorder as Recorder
from sgl_vllm.lang.backends.replay import Replay as Replay
from sgl_vllm.lang.backends.requests import ServerInfo as ServerInfo
from sgl_vllm.lang.backends.vllm import VLLM as VLLM
from sgl_vllm.lang.backends.vllm import RuntimeEndpoint as RuntimeEndpoint
from sgl_vllm.lang.choices import greedy_token_selection as greedy_token_selection
from sgl_vllm.lang.choices import token_length_normalized as token_length_normalized
from sgl_vllm.lang.choices import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from sgl_vllm.lang.errors import BackendError as BackendError
from sgl_vllm.lang.errors import ProgramCancelled as ProgramCancelled
from sgl_vllm.lang.errors import ProgramError as ProgramError
from sgl_vllm.lang.errors import UnsupportedError as UnsupportedError
from sgl_vllm.lang.group import ProgramGroup as ProgramGroup
from sgl_vllm.lang.media import Media as Media
from sgl_vllm.lang.media_api import audio as audio
from sgl_vllm.lang.media_api import image as image
from sgl_vllm.lang.media_api import picture as picture
from sgl_vllm.lang.media_api import speech as speech
from sgl_vllm.lang.media_api import transcribe as transcribe
from sgl_vllm.lang.media_api import video as video
from sgl_vllm.lang.primitives import ToolCall as ToolCall
from sgl_vllm.lang.primitives import agent as agent
from sgl_vllm.lang.primitives import best_of as best_of
from sgl_vllm.lang.primitives import judge as judge
from sgl_vllm.lang.primitives import map_reduce as map_reduce
from sgl_vllm.lang.primitives import retry_until as retry_until
from sgl_vllm.lang.primitives import vote as vote
from sgl_vllm.lang.program import CompiledProgram as CompiledProgram
from sgl_vllm.lang.program import Program as Program
from sgl_vllm.lang.program import ProgramWithOptions as ProgramWithOptions
from sgl_vllm.lang.program import function as function
from sgl_vllm.lang.settings import flush_cache as flush_cache
from sgl_vllm.lang.settings import get_server_info as get_server_info
from sgl_vllm.lang.settings import global_config as global_config
from sgl_vllm.lang.settings import set_default_backend as set_default_backend
from sgl_vllm.lang.state import AsyncProgramState as AsyncProgramState
from sgl_vllm.lang.state import ProgramState as ProgramState
from sgl_vllm.lang.tracing.errors import TraceError as TraceError
from sgl_vllm.lang.transcript import Order as Order
from sgl_vllm.lang.usage import Usage as Usage
from sgl_vllm.lang.view import fork_tree_svg as fork_tree_svg
from sgl_vllm.lang.view import show as show
from sgl_vllm.lang.view import to_html as to_html
from sgl_vllm.lang.view import to_page as to_page
from sgl_vllm.lang.view import why as why

if TYPE_CHECKING:
    from sgl_vllm.lang.planner import model_planner as model_planner
    from sgl_vllm.lang.reordering import ReorderError as ReorderError
_LAZY = {"model_planner": "planner", "ReorderError": "reordering"}
NAMES = sorted({*(name for name in globals() if name[0] != "_"), *_LAZY} - {"TYPE_CHECKING"})


def __getattr__(name: str) -> object:
    """Import what few programs use when it is used."""
    if name in _LAZY:
        return getattr(_import(f"sgl_vllm.lang.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
