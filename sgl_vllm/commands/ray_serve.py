"""`sgl-vllm ray-serve`: replicas on Ray Serve. The work is `routing.ray.app`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sgl_vllm.commands.arguments import argument, option
from sgl_vllm.commands.terminal import CommandError

DESCRIPTION = """\
Serves the models of a Ray Serve LLM configuration file (its LLMServingArgs),
with the plugin in each replica and with a router that sends each request to
the replica where it costs the least compute. Settings in the file win.

A file for two replicas, each on a GPU:

  llm_configs:
    - model_loading_config: {model_id: Qwen/Qwen3-8B}
      deployment_config: {num_replicas: 2}

`sgl-vllm examples serving/ray.yaml` prints an example for CPUs, and
docs/routing.md describes all settings.
"""


def command(
    config: Annotated[Path, argument("CONFIG.yaml", "The configuration file, with llm_configs.")],
    host: Annotated[str, option(None, "The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option(None, "The port to listen on.")] = 8000,
) -> None:
    from sgl_vllm.routing.ray import app  # only this command needs numpy and numba

    try:
        app.run(config, host=host, port=port)
    except app.RayServeError as error:
        raise CommandError(str(error)) from error
