"""``python -m sgl_vllm.sglang.launch_server``: `vllm serve` with the plugin, by SGLang's arguments.

Owns the way from SGLang's command line to vLLM's. The process becomes `vllm serve`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sgl_vllm.sglang.server_args import model_and_arguments


def command(words: Sequence[str]) -> list[str]:
    """The command that starts vLLM's server, for the words of SGLang's."""
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
    address = [
        part
        for option in ("host", "port")
        if option in arguments
        for part in (f"--{option}", str(arguments[option]))
    ]
    model, options = model_and_arguments(arguments)
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    return [*serve, "--plugin", "sgl_vllm", *address, *options]


if __name__ == "__main__":
    started = command(sys.argv[1:])
    os.execv(started[0], started)
