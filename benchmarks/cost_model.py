"""What a forward pass costs: the simulator's linear model. Pure: no vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a forward pass costs, in seconds: a sum of four terms, each linear.

    The defaults are round numbers for a dense model of 8 billion bfloat16 weights on one H100.

    Attributes:
        step_s: once a pass. Reading 16 GB of weights at 3.35 TB/s takes 4.8 ms; launches the rest.
        prefill_token_s: each token of a request that computes several: 16 GFLOP at half of the
            machine's 990 TFLOP/s.
        decode_token_s: each request that computes one token: sampling, and the compute that
            reading the weights does not hide.
        context_token_s: each earlier token of each request in the pass, whose 131 kB of keys and
            values are read.
    """

    step_s: float = 6e-3
    prefill_token_s: float = 32e-6
    decode_token_s: float = 15e-6
    context_token_s: float = 40e-9

    def seconds(self, *, steps: float, prefill: float, decode: float, context: float) -> float:
        """For so many passes, prefill tokens, decode tokens and context tokens in all."""
        return (
            steps * self.step_s
            + prefill * self.prefill_token_s
            + decode * self.decode_token_s
            + context * self.context_token_s
        )

    def pass_s(self, requests: Iterable[tuple[int, int]]) -> float:
        """For one pass, from each request's tokens: (computed before it, computed in it)."""
        prefill = decode = context = 0
        for num_before, num_new in requests:
            context += num_before
            if num_new > 1:
                prefill += num_new
            else:
                decode += num_new
        return self.seconds(steps=1, prefill=prefill, decode=decode, context=context)
