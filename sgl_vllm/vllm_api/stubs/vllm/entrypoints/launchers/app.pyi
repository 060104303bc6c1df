# [engine_backend]
from argparse import Namespace

from fastapi import FastAPI
from vllm.config import ModelConfig

def build_app(
    args: Namespace,
    supported_tasks: tuple[str, ...] | None = ...,
    model_config: ModelConfig | None = ...,
) -> FastAPI: ...
