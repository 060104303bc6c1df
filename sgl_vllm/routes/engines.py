"""The way from vLLM's API process to our scheduler in every engine's process, and back.

Owns nothing: it is vLLM's own utility call. A server with data parallelism has several engines,
each with its own cache and its own answer.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.scheduler.stats import EngineStats, merge_stats

Answer = TypeVar("Answer")


async def ask_engines(
    client: AsyncLLM,
    answer_type: type[Answer],
    what: str,
    arguments: dict[str, Any] | None = None,
) -> list[Answer | None]:
    """The answer of `EngineControl.<what>(**arguments)` in each engine behind `client`.

    One answer per engine, in the order of their ranks. None from an engine without the plugin.
    """
    call = ("sgl_vllm_call", what) if arguments is None else ("sgl_vllm_call", what, arguments)
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        answers = await core.call_utility_all_async(*call)
    else:
        answers = [await core.call_utility_async(*call)]
    return [None if one is None else msgspec.convert(one, answer_type) for one in answers]


def engine_ranks(client: AsyncLLM) -> list[int | None]:
    """What to name in a request that has to run in a certain engine; None if there is only one."""
    num_engines = len(getattr(client.engine_core, "core_engines", ()))
    return list(range(num_engines)) if num_engines > 1 else [None]


async def engine_stats(client: AsyncLLM) -> EngineStats:
    """The merged report of all engines behind `client`."""
    answers = await ask_engines(client, EngineStats, "stats")
    return merge_stats([answer for answer in answers if answer is not None])
