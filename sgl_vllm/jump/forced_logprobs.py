"""Log-probabilities of forced tokens.

Owns their rows only: those that vLLM's sampler gives a token when no other is legal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import LogprobsLists


def rows_of_forced(tokens: Sequence[int], like: LogprobsLists) -> LogprobsLists:
    """The log-probabilities that vLLM gives a token when no other is legal.

    Among k alternatives, the token itself is first, with 0.0. The others have minus infinity, and
    their ids mean nothing.

    Returns:
        One row per token, as wide as the rows of `like`, with its types.
    """
    width = like.logprob_token_ids.shape[1]
    ids = [[t, t, *(other for other in range(width) if other != t)][:width] for t in tokens]
    logprobs = np.full((len(tokens), width), -np.inf, like.logprobs.dtype)
    logprobs[:, :2] = 0
    return LogprobsLists(
        np.array(ids, like.logprob_token_ids.dtype).reshape(len(tokens), width),
        logprobs,
        np.ones(len(tokens), like.sampled_token_ranks.dtype),
    )


def joined(first: LogprobsLists, second: LogprobsLists) -> LogprobsLists:
    """The rows of `first`, then those of `second`."""
    return LogprobsLists(
        np.concatenate((first.logprob_token_ids, second.logprob_token_ids)),
        np.concatenate((first.logprobs, second.logprobs)),
        np.concatenate((first.sampled_token_ranks, second.sampled_token_ranks)),
    )
