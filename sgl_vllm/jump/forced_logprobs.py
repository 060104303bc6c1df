"""Log-probabilities of forced tokens: those that vLLM's sampler gives when no other is legal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request


def rows_of_forced(tokens: Sequence[int], like: LogprobsLists, request: Request) -> LogprobsLists:
    """One row per token, as wide as the rows of `like`, with its types.

    The token itself is first, with 0.0. The alternatives have minus infinity: those that `request`
    asks for by name, or any.
    """
    params = request.sampling_params
    asked = (params.logprob_token_ids if params is not None else None) or ()
    width = like.logprob_token_ids.shape[1]  # with all alternatives, one more than the vocabulary
    ids = np.empty((len(tokens), width), like.logprob_token_ids.dtype)
    for row, token in zip(ids, tokens, strict=True):
        if asked:
            row[:] = [token, *asked, *[token] * width][:width]
        else:  # the token, and all alternatives, of which it is the first
            others = np.arange(width)
            row[:] = np.concatenate(((token, token), others[others != token]))[:width]
    logprobs = np.where(ids == ids[:, :1], 0, -np.inf).astype(like.logprobs.dtype)
    return LogprobsLists(ids, logprobs, np.ones(len(tokens), like.sampled_token_ranks.dtype))


def joined(first: LogprobsLists, second: LogprobsLists) -> LogprobsLists:
    """The rows of `first`, then those of `second`."""
    pairs = zip(first[:3], second[:3], strict=True)  # ids, log-probabilities, ranks
    return LogprobsLists(*(np.concatenate(pair) for pair in pairs))
