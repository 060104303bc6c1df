"""`sgl-vllm ray-serve`: replicas on Ray Serve. The work is `routing.ray.app`'s."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Serves the models of a Ray Serve LLM configuration file (its LLMServingArgs),
with the plugin in each replica and with a router that sends each request to
the replica where it costs the least compute. Settings in the file win.
A file for two replicas, each on a GPU:

  llm_configs:
    - model_loading_config: {model_id: Qwen/Qwen3-8B}
      deployment_config: {num_replicas: 2}

`sgl-vllm examples serving/ray.yaml` prints an example for CPUs, and docs/ray.md
describes all settings.
"""


def declare(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="the configuration file, with llm_configs"
    )
    command.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)"
    )
    command.add_argument(
        "--port", type=int, default=8000, help="the port to listen on (default: %(default)s)"
    )


def main(options: argparse.Namespace) -> int:
    from sgl_vllm.routing.ray import app  # only this command needs numpy and numba

    try:
        app.run(options.config, host=options.host, port=options.port)
    except app.RayServeError as error:
        print(f"sgl-vllm: {error}", file=sys.stderr)
        return 1
    return 0
