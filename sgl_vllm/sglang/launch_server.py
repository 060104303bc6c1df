"""``python -m sgl_vllm.sglang.launch_server``: `vllm serve` with the plugin, by SGLang's arguments.

Owns vLLM's option for each of SGLang's arguments, for `Runtime` too. The process becomes
`vllm serve`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence

from sgl_vllm.server_process import VllmServer
from sgl_vllm.spelling import did_you_mean

_SAME_NAME = """tokenizer_mode load_format dtype quantization kv_cache_dtype revision
    served_model_name chat_template api_key reasoning_parser tool_call_parser download_dir"""

_VALUES = {name: f"--{name.replace('_', '-')}" for name in _SAME_NAME.split()} | {
    "tokenizer_path": "--tokenizer",
    "context_length": "--max-model-len",
    "mem_fraction_static": "--gpu-memory-utilization",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--max-num-batched-tokens",
    "page_size": "--block-size",
    "tp_size": "--tensor-parallel-size",
    "tp": "--tensor-parallel-size",
    "pp_size": "--pipeline-parallel-size",
    "dp_size": "--data-parallel-size",
    "dp": "--data-parallel-size",
    "random_seed": "--seed",
}
"""Arguments with a value, and vLLM's option for it."""

_FLAGS = {
    "trust_remote_code": "--trust-remote-code",
    "skip_tokenizer_init": "--skip-tokenizer-init",
    "disable_cuda_graph": "--enforce-eager",
    "disable_radix_cache": "--no-enable-prefix-caching",
    "enable_lora": "--enable-lora",
}

_WITHOUT_MEANING = frozenset({"host", "port", "log_level", "device"})
"""Arguments that choose what the server process chooses itself."""


def model_and_arguments(arguments: Mapping[str, object]) -> tuple[str, list[str]]:
    """The model, and the options of `vllm serve`, for SGLang's arguments.

    An argument that vLLM has no option for is ignored with a UserWarning. Raises TypeError without
    `model_path`.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    model = given.pop("model_path", None) or given.pop("model", None)
    if model is None:
        raise TypeError("the server needs a model: pass model_path")
    options = ["--enable-prompt-tokens-details"]  # for cached_tokens, which SGLang's always tells
    for name, value in given.items():
        if name in _VALUES:
            options += [_VALUES[name], str(value)]
        elif name in _FLAGS:
            options += [_FLAGS[name]] if value else []
        elif name not in _WITHOUT_MEANING:
            near = did_you_mean(name, (*_VALUES, *_FLAGS))
            warnings.warn(f"vLLM has no option for {name}, which is ignored{near}", stacklevel=3)
    return str(model), options


def server_of(words: Sequence[str]) -> VllmServer:
    """vLLM's server, not started, for the words of SGLang's command line."""
    arguments: dict[str, object] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            option, has_value, value = word.removeprefix("--").partition("=")
            name = option.replace("-", "_")
            arguments[name] = value if has_value else True
        elif name is not None:
            arguments[name] = word
            name = None
    model, options = model_and_arguments(arguments)
    for name in ("host", "port"):
        if name in arguments:
            options += [f"--{name}", str(arguments[name])]
    return VllmServer(model, plugin=True, extra_args=options)


if __name__ == "__main__":
    server = server_of(sys.argv[1:])
    os.execve(server.command[0], server.command, server.environment)
