"""What vLLM lacks to cache prefixes of some models on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


def allow_prefix_caching(patch: pytest.MonkeyPatch) -> None:
    """From now on engines of this process cache prefixes and prefill in chunks if they are asked
    to, whatever their model. On a CPU without AMX, vLLM switches both off for MLA, though its
    reference backend computes both."""
    configure = CpuPlatform.check_and_update_config.__func__

    def and_keep(cls: type[CpuPlatform], config: VllmConfig) -> None:
        scheduling = config.scheduler_config
        is_caching = config.cache_config.enable_prefix_caching
        is_chunked = scheduling.enable_chunked_prefill
        max_num_batched_tokens = scheduling.max_num_batched_tokens
        configure(cls, config)
        config.cache_config.enable_prefix_caching = is_caching
        scheduling.enable_chunked_prefill = is_chunked
        scheduling.max_num_batched_tokens = max_num_batched_tokens

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(and_keep))


def let_mamba2_keep_states(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM cache prefixes of Mamba-2 on a CPU, in engines that start in this process.

    For that it takes a state from inside a prompt, after one of the chunks in which the prompt is
    scanned. Its CPU kernel returns the last states only, and the kernel that stores what it took is
    for GPUs alone. So here the former runs chunk by chunk, and the latter is in PyTorch.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    scan = ssd_combined._mamba_chunk_scan_combined_fwd

    def scan_by_chunks(x, dt, a, b, c, chunk_size, out, **more: Any) -> torch.Tensor:
        if not more.pop("return_intermediate_states", False):
            return scan(x, dt, a, b, c, chunk_size, out, **more)
        z, first_states = more.pop("z", None), more.pop("initial_states", None)
        bounds, requests = more.pop("cu_chunk_seqlens").tolist(), more.pop("seq_idx").tolist()
        del more["cu_seqlens"]
        states: list[torch.Tensor] = []
        for number, request in enumerate(requests):
            if number and requests[number - 1] == request:
                before = states[-1]
            else:
                before = None if first_states is None else first_states[request : request + 1]
            chunk = slice(bounds[number], bounds[number + 1])
            states.append(
                scan(
                    *(x[chunk], dt[chunk], a, b[chunk], c[chunk], chunk_size, out[chunk]),
                    z=None if z is None else z[chunk],
                    initial_states=before,
                    cu_seqlens=torch.tensor([0, chunk.stop - chunk.start], dtype=torch.int32),
                    **more,
                )
            )
        return torch.cat(states)

    def store(
        taken, chunk_numbers, x, conv_state, chunk_states, ssm_state, query_start_loc, *, state_len
    ) -> None:
        for row, offset in enumerate(taken.checkpoint_offsets.tolist()):
            if offset > 0:
                block = taken.state_indices[row]
                end = query_start_loc[row] + offset
                conv_state[block, :, :state_len] = x[:, end - state_len : end]
                ssm_state[block] = chunk_states[chunk_numbers[row]]

    patch.setattr(ssd_combined, "_mamba_chunk_scan_combined_fwd", scan_by_chunks)
    patch.setattr(mamba_mixer2, "store_prefill_checkpoint", store)
