"""An engine in the benchmark's own process, where it can be timed and looked into."""

from __future__ import annotations

import os

from sgl_vllm.server_process import CPU_ENVIRONMENT


def prepare_engine_in_this_process() -> None:
    """Sets the environment that this takes; what the user has set stays. Before vLLM's import."""
    for name, value in {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
