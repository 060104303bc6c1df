"""What vLLM lacks to cache prefixes of some models on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
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


def compute_delta_rule_by_token(patch: pytest.MonkeyPatch) -> None:
    """Let linear attention (gated delta rule) give the same states and outputs however a prompt is
    cut into passes, with and without drafts, in engines of this process.

    vLLM's CPU kernels round differently for a prompt and for a token, and keep a wrong convolution
    state where a request has fewer drafts than others could have. Here each token is computed
    alone, in float32.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as kernels

    def by_token(layer, step, mixed_qkv, b, a, out, *_: Any) -> None:
        conv, states = kernels._conv_buffer_view(layer), kernels._ssm_state_view(layer)
        for row in _rows(step):
            places = row.places
            qkv = _convolve(layer, conv, mixed_qkv[places].float(), row)
            gates = -layer.A_log.exp() * F.softplus(a[places].float() + layer.dt_bias)
            parts = [part.squeeze(0) for part in layer.rearrange_mixed_qkv(qkv)]
            state = states[row.source] if row.has_state else torch.zeros_like(states[0])
            for number, (q, k, v, gate, beta) in enumerate(
                zip(*parts, gates.exp(), b[places].float().sigmoid(), strict=True)
            ):
                heads = len(v) // len(q)
                q = F.normalize(q, dim=-1).repeat_interleave(heads, 0) * q.shape[-1] ** -0.5
                k = F.normalize(k, dim=-1).repeat_interleave(heads, 0)
                state = state * gate[:, None, None]
                change = (v - torch.einsum("hkv,hk->hv", state, k)) * beta[:, None]
                state = state + k[:, :, None] * change[:, None, :]
                out[places[number]] = torch.einsum("hkv,hk->hv", state, q).to(out.dtype)
                if row.keeps_each:
                    states[row.blocks[number]] = state
            states[row.blocks[number if row.keeps_each else 0]] = state

    patch.setattr(kernels, "_cpu_gdn_attention_nonspec", by_token)
    patch.setattr(kernels, "_cpu_gdn_attention_spec_aware", by_token)


class _Row(NamedTuple):
    """A request in a pass.

    Attributes:
        places: of its tokens among those of the pass.
        blocks: of its states: one, or one for each token.
        num_accepted: the tokens of its last pass that count.
    """

    places: list[int]
    blocks: list[int]
    num_accepted: int
    has_state: bool
    keeps_each: bool

    @property
    def source(self) -> int:
        return self.blocks[self.num_accepted - 1]


def _rows(step: Any) -> Iterator[_Row]:
    """By vLLM's `GDNAttentionMetadata`."""
    is_split = step.spec_sequence_masks is not None
    if is_split:
        places = step.spec_token_indx.tolist()
        ends = step.spec_query_start_loc.tolist()
        for number, (start, end) in enumerate(pairwise(ends)):
            if end > start:
                blocks = step.spec_state_indices_tensor[number].tolist()
                accepted = int(step.num_accepted_tokens[number])
                yield _Row(places[start:end], blocks, accepted, True, True)
    if step.non_spec_query_start_loc is None:
        return
    ends = step.non_spec_query_start_loc.tolist()
    for number, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            places = step.non_spec_token_indx.tolist() if is_split else range(ends[-1])
            begins = step.has_initial_state is not None and not step.has_initial_state[number]
            blocks = [int(step.non_spec_state_indices_tensor[number])]
            yield _Row([*places[start:end]], blocks, 1, not begins, False)


def _convolve(layer: Any, conv: torch.Tensor, tokens: torch.Tensor, row: _Row) -> torch.Tensor:
    """The convolution of a request's tokens, whose state is in the row's first block: the inputs
    before the first token, or before each."""
    weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1).float()
    width, state = weight.shape[1] - 1, conv[row.blocks[0]]
    before = state[:, row.num_accepted - 1 :][:, :width].float()
    inputs = torch.cat([before if row.has_state else torch.zeros_like(before), tokens.T], dim=1)
    kept = inputs[:, 1:] if row.keeps_each else inputs[:, -width:]
    state[:, : kept.shape[1]] = kept.to(state.dtype)
    bias = None if layer.conv1d.bias is None else layer.conv1d.bias.float()
    return F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight)))[0].T
