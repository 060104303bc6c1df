"""What a request may ask of the plugin: keys in its `extra_args` (HTTP: `vllm_xargs`).

The language writes them; the engine, or a router before it, reads them. Stock vLLM ignores them.
"""

from __future__ import annotations

PROGRAM, FORK_GROUP = "sgl_program", "sgl_fork_group"
"""Strings or numbers: of one client's requests, those with the same program and fork group are
kept together in the queue, and those with the same program at one of several engines."""

REPORT = "sgl_report"
"""Anything but 0 asks which part of the output was forced; told under the same key of
`kv_transfer_params` in the answer."""

SCORE_FROM = "sgl_score_from"
"""The index n >= 1 of the first prompt token whose log-probability is wanted. With it,
`prompt_logprobs` reads the first n - 1 tokens from the cache, and has rows for the tokens from n on
alone, after the None that vLLM begins with: each row costs the API process microseconds, and a
prompt has thousands."""
