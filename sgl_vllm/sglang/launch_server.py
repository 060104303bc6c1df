"""``python -m sgl_vllm.sglang.launch_server``: `vllm serve` with the plugin, by SGLang's arguments.

Owns the way from SGLang's command line to vLLM's. The process becomes `vllm serve`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sgl_vllm.server_process import VllmServer
from sgl_vllm.sglang.server_args import model_and_arguments


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
