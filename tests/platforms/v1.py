"""What vLLM's deprecated V1 model runner alone needs."""

from __future__ import annotations

import pytest
from vllm.v1.worker.gpu_input_batch import InputBatch


def count_all_sampled_tokens(patch: pytest.MonkeyPatch) -> None:
    """Work around a bug in vLLM 0.32's V1 runner. It keeps placeholders for sampled tokens until a
    request with penalties or `bad_words` joins the batch. Then it replaces all placeholders of a
    request with one token, so a request with `min_tokens` runs too long.

    This patch keeps the other placeholders.
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
