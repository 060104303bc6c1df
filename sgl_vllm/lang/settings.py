"""What holds for all programs of a process.

Owns `global_config`, under SGLang's name and with those of its fields that mean something here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.lang.backends.base import Backend


@dataclass
class GlobalConfig:
    """`default_backend` is used by every run that is not given one. With
    `enable_precache_with_tracing`, `run_batch` sends what its prompts have in common first."""

    default_backend: Backend | None = None
    enable_precache_with_tracing: bool = True


global_config = GlobalConfig()
