"""SGLang's frontend language, for programs written for it: ``import sgl_vllm.sglang as sgl``.

It has SGLang's names, argument spellings, submodules and meanings. The language itself is
`sgl_vllm`, which new programs should import; docs/moving.md says how the two differ.
"""

from sgl_vllm.sglang.global_config import global_config
from sgl_vllm.sglang.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from sgl_vllm.sglang.lang.backend.anthropic import Anthropic
from sgl_vllm.sglang.lang.backend.litellm import LiteLLM
from sgl_vllm.sglang.lang.backend.openai import OpenAI
from sgl_vllm.sglang.lang.backend.runtime_endpoint import Runtime, RuntimeEndpoint
from sgl_vllm.sglang.lang.backend.vertexai import VertexAI
from sgl_vllm.sglang.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
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

_NOT_HERE = {
    "Engine": "use a server (Runtime), vLLM's own LLM class, or sgl_vllm.Engine as a backend",
    "ServerArgs": "pass the arguments to Runtime",
}


def __getattr__(name: str) -> object:
    """Say what to use instead of SGLang's names that are not part of the language."""
    if name in _NOT_HERE:
        raise AttributeError(f"sgl_vllm.sglang has no {name}: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
