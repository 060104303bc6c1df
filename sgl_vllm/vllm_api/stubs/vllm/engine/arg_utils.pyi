import argparse
from collections.abc import Mapping
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

class EngineArgs:
    additional_config: Mapping[str, Any]
    scheduler_cls: str | type[object] | None
    attention_backend: AttentionBackendEnum | None  # [prefix_attention]

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser: ...
    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self: ...
    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig: ...

class AsyncEngineArgs(EngineArgs):  # [engine_backend, preview]
    # It has a field for each of vLLM's options; which of them are given is the caller's.
    def __init__(self, model: str = ..., **options: Any) -> None: ...
