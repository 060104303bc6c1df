"""vLLM's asynchronous scheduling on its CPU build, which switches it off.

The engine core, its batch queue and the model runners are vLLM's own, with their asynchronous
branches. A pass has run when `execute_model` returns, but its tokens are handed out one step later,
and the next pass takes them from where a GPU would have them. What is put in place are the CUDA
streams and events, which have nothing to wait for here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


class _Nothing:
    """A CUDA stream or event when nothing runs beside the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def _wait(self, *args: Any) -> None:
        pass

    record = synchronize = wait_stream = wait = wait_event = _wait


def allow(patch: pytest.MonkeyPatch) -> None:
    """From now on engines of this process schedule asynchronously unless they are asked not to, as
    on a GPU."""
    configure = CpuPlatform.check_and_update_config.__func__

    def and_keep_async(cls: type[CpuPlatform], config: VllmConfig) -> None:
        decided = config.scheduler_config.async_scheduling
        configure(cls, config)
        config.scheduler_config.async_scheduling = decided

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(and_keep_async))
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, _Nothing)
    patch.setattr(torch.cuda, "current_stream", _Nothing)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
