"""Log-probabilities of forced tokens.

Owns their rows only: those that vLLM's sampler gives a token when no other is legal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request


def rows_of_forced(
    tokens: Sequence[int], like: LogprobsLists, asked: Sequence[int] = ()
) -> LogprobsLists:
    """The log-probabilities that vLLM gives a token when no other is legal.

    Among k alternatives, the token itself is first, with 0.0. The others have minus infinity, and
    their ids mean nothing.

    Args:
        asked: the tokens of `logprob_token_ids`, which are the alternatives then.

    Returns:
        One row per token, as wide as the rows of `like`, with its types.
    """
    width = like.logprob_token_ids.shape[1]  # with all alternatives, one more than the vocabulary
    ids = np.empty((len(tokens), width), like.logprob_token_ids.dtype)
    for row, token in zip(ids, tokens, strict=True):
        row[:] = [token, *asked, *[token] * width][:width] if asked else _any_ids(token, width)
    logprobs = np.where(ids == ids[:, :1], 0, -np.inf).astype(like.logprobs.dtype)
    return LogprobsLists(ids, logprobs, np.ones(len(tokens), like.sampled_token_ranks.dtype))


def asked_tokens(request: Request) -> Sequence[int]:
    """The tokens whose log-probabilities `request` asks for by name."""
    params = request.sampling_params
    return (params.logprob_token_ids or ()) if params is not None else ()


def _any_ids(token: int, width: int) -> NDArray[np.intp]:
    """The token, then the alternatives, of which it is the first."""
    others = np.arange(width)
    return np.concatenate(((token, token), others[others != token]))[:width]


def joined(first: LogprobsLists, second: LogprobsLists) -> LogprobsLists:
    """The rows of `first`, then those of `second`."""
    return LogprobsLists(
        np.concatenate((first.logprob_token_ids, second.logprob_token_ids)),
        np.concatenate((first.logprobs, second.logprobs)),
        np.concatenate((first.sampled_token_ranks, second.sampled_token_ranks)),
    )
