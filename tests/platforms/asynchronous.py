"""vLLM's asynchronous scheduling on its CPU build, which switches it off.

The engine core, its batch queue and the V1 model runner are vLLM's own, with their asynchronous
branches. A pass of the V1 runner has run when `execute_model` returns, but its tokens are handed
out one step later, and the next pass takes them from where a GPU would have them. What is put in
place are the CUDA streams and events, which have nothing to wait for here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu_input_batch import InputBatch


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
    _count_all_sampled_tokens(patch)


def _count_all_sampled_tokens(patch: pytest.MonkeyPatch) -> None:
    """Mend an error of vLLM 0.32's V1 runner, which has placeholders for what a request has sampled
    until a request with penalties or `bad_words` joins the batch. Then one sampled token takes the
    place of all placeholders, so that a request with `min_tokens` goes on for too long.

    Here the other placeholders stay.
    """
    replace = InputBatch.update_async_output_token_ids

    def replace_last(batch: InputBatch) -> None:
        outputs = batch.sampling_metadata.output_token_ids
        num_before = [len(output) for output in outputs]
        replace(batch)
        sampled = batch.sampled_token_ids_cpu
        if sampled is None or sampled.shape[1] > 1:  # of drafts, some are rejected
            return
        for output, num in zip(outputs, num_before, strict=True):
            output[-1:-1] = [-1] * (num - len(output))

    patch.setattr(InputBatch, "update_async_output_token_ids", replace_last)
