"""Forced tokens that the sampling parameters of their request would refuse or change.

These parameters do not affect most forced text. Where they do, nothing is forced and the model
decodes token by token, as without jumps. `part.py` has the requests that never jump.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request


def refuses(request: Request, forced: Sequence[int]) -> bool:
    """Whether one of the tokens forced after what `request` has is biased, not allowed, or the end
    of a bad word, as vLLM spells it. Cost: O(1) without such parameters."""
    params = request.sampling_params
    assert params is not None
    if params.logit_bias and not params.logit_bias.keys().isdisjoint(forced):
        return True
    if params.allowed_token_ids and not set(forced).issubset(params.allowed_token_ids):
        return True
    bad_words = params.bad_words_token_ids or ()
    longest = max(map(len, bad_words), default=0)
    before = request.output_token_ids[-(longest - 1) :] if longest > 1 else ()
    tokens = [*before, *forced] if bad_words else ()
    return any(
        tokens[end - len(word) : end] == word
        for end in range(len(before) + 1, len(tokens) + 1)
        for word in bad_words
        if len(word) <= end
    )
