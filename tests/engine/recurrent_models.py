"""Small models with random weights, three of whose four layers are recurrent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.play import LOGPROB_TOLERANCE, NEAR_TIE
from tests.engine.window_models import random_model, save


@dataclass(frozen=True)
class RecurrentModel:
    """A kind of model, as transformers names it.

    Attributes:
        config: over what all small models have.
        recurrent_output: part of the names of the last weights of each recurrent layer.
        fixed: by the end of their names, weights with one value. By chance a state would forget
            within a few tokens, or what goes around it would outweigh it, and a wrong one would go
            unnoticed.
        keeps_state_inside_pass: vLLM can take a state from inside a prompt that it computes.
        block_size: tokens per block, as vLLM sets it so that a state fits.
        fewest_blocks: of a cache that holds hardly more than the longest request of a program.
        dtype: that vLLM's CPU kernels of these layers take.
        rounding: how far logits may be off, depending on how a request is cut into passes.
        tolerance: the same of log-probabilities.
    """

    kind: str
    config: Mapping[str, Any]
    recurrent_output: str
    block_size: int
    fewest_blocks: int
    fixed: Mapping[str, float] = field(default_factory=dict)
    keeps_state_inside_pass: bool = False
    dtype: str = "float32"
    rounding: float = NEAR_TIE
    tolerance: float = LOGPROB_TOLERANCE

    def engine_args(self, path: str) -> dict[str, Any]:
        """Of an engine for the model at `path`, with a cache of prefixes."""
        return {
            "model": path,
            "dtype": self.dtype,
            # On CPUs with AVX-512 BF16 vLLM keeps linear attention's states so in any case. Their
            # size is that of a block.
            "mamba_ssm_cache_dtype": "float32",
            "enable_prefix_caching": True,
        }

    def write(self, folder: Path) -> str:
        """Write the model, with the demo model's tokenizer, into a new folder. Returns its path."""
        model = random_model(self.kind, dict(self.config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self.recurrent_output in name:
                    parameter *= RECURRENT_SHARE
                for end, value in self.fixed.items():
                    if name.endswith(end):
                        parameter.fill_(value)
        return save(model.to(getattr(torch, self.dtype)), folder)


RECURRENT_SHARE = 8.0
"""Makes the recurrent layers matter: with random weights they would add little to what the layers
before them pass on, and a wrong state would go unnoticed."""

_BFLOAT16_STEP = 0.006
"""The step between neighbors in bfloat16 is 0.004 at the size of the logits."""

MODELS = {
    # Gated delta rule (linear attention).
    "qwen3_next": RecurrentModel(
        "qwen3_next",
        {
            "head_dim": 32,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        recurrent_output="linear_attn.out_proj",
        block_size=544,
        fewest_blocks=20,
        dtype="bfloat16",
        rounding=_BFLOAT16_STEP,
        tolerance=_BFLOAT16_STEP,
    ),
    # Mamba-2, as Granite 4 and Nemotron-H have it.
    "granite4": RecurrentModel(
        "granitemoehybrid",
        {
            "layer_types": ["mamba"] * 3 + ["attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
        },
        recurrent_output="mamba.out_proj",
        fixed={".A_log": -5.0, ".D": 0.05},
        keeps_state_inside_pass=True,
        block_size=96,
        fewest_blocks=26,
    ),
}
"""By the name that the tests give it."""


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
