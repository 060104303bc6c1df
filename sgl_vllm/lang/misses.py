"""Why prompt tokens of a run's generations were not read from the server's cache.

Owns which generations are asked about. The causes come from the backend, and the views show them.
"""

from __future__ import annotations

from sgl_vllm.lang.run import Run
from sgl_vllm.lang.transcript import GenMeta
from sgl_vllm.protocol.scoring import all_answers

MAX_AT_ONCE = 8
"""Requests to the server at a time: its engine answers between two steps."""


async def ask_why(run: Run) -> None:
    """Add to `run.missed_tokens` what the server knows of the generations that have ended and that
    it was not asked about before."""
    request_ids = [name for name in _request_ids(run) if name not in run.missed_tokens]
    for start in range(0, len(request_ids), MAX_AT_ONCE):
        names = request_ids[start : start + MAX_AT_ONCE]
        answers = await all_answers([run.backend.missed_tokens(name) for name in names])
        run.missed_tokens.update(zip(names, answers, strict=True))


def _request_ids(run: Run) -> list[str]:
    """Of the named generations that have ended, without repetitions."""
    metas = [
        future.result().meta
        for stream in list(run.streams)
        for future in list(stream.variables.values())
        if future.done() and not future.cancelled() and future.exception() is None
    ]
    ids = [meta.request_id for meta in metas if isinstance(meta, GenMeta)]
    return list(dict.fromkeys(name for name in ids if name is not None))
