"""SGLang's server arguments, and vLLM's name of each.

Owns the table. Used for `Runtime(...)` and for ``python -m sgl_vllm.sglang.launch_server``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from sgl_vllm.spelling import did_you_mean

_VALUES = {
    "tokenizer_path": "--tokenizer",
    "tokenizer_mode": "--tokenizer-mode",
    "load_format": "--load-format",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "context_length": "--max-model-len",
    "revision": "--revision",
    "served_model_name": "--served-model-name",
    "chat_template": "--chat-template",
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
    "api_key": "--api-key",
    "reasoning_parser": "--reasoning-parser",
    "tool_call_parser": "--tool-call-parser",
    "download_dir": "--download-dir",
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
