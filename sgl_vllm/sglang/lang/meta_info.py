"""What `get_meta_info` returns in SGLang's form.

Owns SGLang's names. Tokens are ``(logprob, token id, text)``; the id is None, because OpenAI's API
does not return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias  # Any: JSON-like values

from sgl_vllm.lang.backends.base import TokenLogprob, Usage
from sgl_vllm.lang.transcript import GenMeta, MediaMeta, Report, SelectMeta, Variable

Token: TypeAlias = tuple[float, None, str | None]


def sglang_meta_info(variable: Variable) -> dict[str, Any]:
    """How a variable was made. Empty for a value that the program set itself."""
    match variable.meta:
        case None:
            return {}
        case Report(details):
            return dict(details)
        case GenMeta():
            return _of_gen(variable.meta)
        case SelectMeta(_, scores, token_logprobs, usage, details):
            tokens = [[(logprob, None, None) for logprob in choice] for choice in token_logprobs]
            return {
                "normalized_prompt_logprobs": list(scores),
                "input_token_logprobs": tokens,
                "output_token_logprobs": [[] for _ in tokens],
                **_counts(usage),
                **details,
            }
        case MediaMeta(reason, usage):
            return {"finish_reason": _reason(reason, usage), **_counts(usage)}


def _of_gen(meta: GenMeta) -> dict[str, Any]:
    """With n > 1, the reasons and the output's tokens are lists with an entry per text."""
    reasons = [_reason(reason, meta.usage) for reason in meta.finish_reason]
    tokens = [_tokens(text, meta.with_text) for text in meta.output_token_logprobs]
    tops = [_tops(text, meta.with_text) for text in meta.output_token_logprobs]
    is_list = len(reasons) > 1
    return {
        "id": meta.request_id,
        "finish_reason": reasons if is_list else reasons[0],
        "output_token_logprobs": tokens if is_list else tokens[0],
        "output_top_logprobs": tops if is_list else tops[0],
        "input_token_logprobs": _tokens(meta.prompt_logprobs, meta.with_text),
        "input_top_logprobs": _tops(meta.prompt_logprobs, meta.with_text),
        **_counts(meta.usage),
    }


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_prompt_tokens,
    }


def _reason(reason: str, usage: Usage) -> dict[str, Any]:
    if reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    return {"type": reason, "matched": None}


def _tokens(tokens: Sequence[TokenLogprob], with_text: bool) -> list[Token]:
    return [(token.logprob, None, token.text if with_text else None) for token in tokens]


def _tops(tokens: Sequence[TokenLogprob], with_text: bool) -> list[list[Token]]:
    """The alternatives at each position, the most likely first."""
    return [
        [(logprob, None, text if with_text else None) for text, logprob in _most_likely(token)]
        for token in tokens
    ]


def _most_likely(token: TokenLogprob) -> list[tuple[str, float]]:
    return sorted(token.top, key=lambda one: -one[1])
