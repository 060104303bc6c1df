"""What an engine needs around prefix-grouped decode: when it applies, and plans of one step after
the other.

Knows the layout of vLLM's tensors and none of its classes: `attention_backend` is the adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .prefix_levels import DEFAULT_COSTS, AttentionShape, Costs, Ints
from .prefix_plan import Plan, make_plan

if TYPE_CHECKING:
    import torch

    from .prefix_attention import DevicePlan

MAX_STEPS = 64
"""A plan is made anew after so many steps, as splits of tails fit ever less."""


# -- when it applies


@dataclass(frozen=True)
class Layer:
    """What of an attention layer decides whether the kernel computes what the layer asks for."""

    head_size: int
    num_heads: int
    num_kv_heads: int
    is_decoder: bool = True
    has_sliding_window: bool = False
    has_alibi: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_quantized_cache: bool = False
    decode_context_parallel: int = 1

    @property
    def why_not(self) -> str | None:
        """Why the layer's decode steps are not for us; None if they are."""
        reasons = {
            "it is not a decoder's self-attention": not self.is_decoder,
            "it has a sliding window": self.has_sliding_window,
            "it has ALiBi slopes": self.has_alibi,
            "it caps its logits": self.has_softcap,
            "it has attention sinks": self.has_sinks,
            "its KV cache is quantized": self.has_quantized_cache,
            "decode context parallelism splits its KV": self.decode_context_parallel > 1,
            f"its head size is {self.head_size}": self.head_size % 16 != 0 or self.head_size > 256,
            "its heads do not share KV heads evenly": self.num_heads % self.num_kv_heads != 0,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


def num_decodes(query_start_loc: Ints) -> int | None:
    """How many requests a batch has if each has one query token, in its own row; else None.

    Args:
        query_start_loc: [num_rows + 1], on the CPU; rows behind the last token are padding.
    """
    count = int(query_start_loc[-1])
    if count >= len(query_start_loc):
        return None
    is_decode = np.array_equal(query_start_loc[: count + 1], np.arange(count + 1))
    return count if is_decode and (query_start_loc[count:] == count).all() else None


# -- one step after the other


class Planner:
    """Plans for the decode steps of one engine, which mostly differ by a token per request.

    A plan is kept while its requests only grow and the blocks that it shares are the same, which
    costs a comparison of those blocks: some 0.1 ms for 256 requests with 2,000 blocks each, a tenth
    of a new plan. Where no plan pays, the question is not asked again meanwhile.
    """

    def __init__(
        self, shape: AttentionShape, costs: Costs = DEFAULT_COSTS, max_steps: int = MAX_STEPS
    ) -> None:
        self._shape = shape
        self._costs = costs
        self._max_steps = max_steps
        self._num_steps = max_steps  # that the plan has been used
        self._plan: Plan | None = None
        self._lengths: Ints = np.zeros(0, dtype=np.int32)
        self._shared: NDArray[np.bool_] = np.zeros((0, 0), dtype=bool)
        self._blocks: Ints = np.zeros((0, 0), dtype=np.int32)

    def plan(self, block_table: Ints, seq_lens: Ints) -> Plan | None:
        """See `make_plan`, for the arguments too. Neither is kept."""
        if not self._still_fits(block_table, seq_lens):
            self._plan = make_plan(block_table, seq_lens, self._shape, self._costs)
            self._num_steps = 0
            shared = np.zeros(0, dtype=np.int32)
            if self._plan is not None:
                shared = self._plan.shared_blocks
            width = int(shared.max(initial=0))
            self._shared = np.arange(width) < shared[:, None]
            self._blocks = block_table[: len(shared), :width].copy()
        self._num_steps += 1
        self._lengths = seq_lens.copy()
        return self._plan

    def _still_fits(self, block_table: Ints, seq_lens: Ints) -> bool:
        if self._num_steps >= self._max_steps or len(seq_lens) != len(self._lengths):
            return False
        if not np.array_equal(seq_lens, self._lengths + 1):
            return False
        num_rows, width = self._shared.shape
        differs = block_table[:num_rows, :width] != self._blocks
        return not (differs & self._shared).any()


# -- the call


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DevicePlan,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Of the first `plan.plan.num_requests` tokens; the others are padding and left alone.

    Args:
        query: [num_tokens, num_heads, head_size].
        kv_cache: vLLM's, [num_blocks, num_kv_heads, block_size, 2 * head_size].
        block_table: [num_rows, max_blocks] int32.
        seq_lens: [num_rows] int32.
        output: like `query`.
    """
    from .prefix_attention import prefix_decode_attention

    count = plan.plan.num_requests
    key_cache, value_cache = kv_cache.transpose(1, 2).split(query.shape[2], dim=-1)
    prefix_decode_attention(
        query[:count],
        key_cache,
        value_cache,
        block_table[:count],
        seq_lens[:count],
        plan,
        scale=scale,
        out=output[:count],
    )
