"""The way from vLLM's API process to our scheduler in every engine's process, and back.

Owns nothing: it is vLLM's own utility call. A server with data parallelism has several engines,
each with its own cache and its own answer.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


async def ask_engines(
    client: AsyncLLM, what: str, arguments: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """What `scheduler.sgl_vllm_<what>(**arguments)` returns in each engine behind `client`.

    One answer per engine, in the order of their ranks; an engine without the plugin answers `{}`.
    """
    call = ("sgl_vllm_call", what) if arguments is None else ("sgl_vllm_call", what, arguments)
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        return list(await core.call_utility_all_async(*call))
    return [await core.call_utility_async(*call)]


def engine_ranks(client: AsyncLLM) -> list[int | None]:
    """What to name in a request that has to run in a certain engine; None if there is only one."""
    num_engines = len(getattr(client.engine_core, "core_engines", ()))
    return list(range(num_engines)) if num_engines > 1 else [None]


def merge_stats(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counters of several engines added up; what is no number is the first engine's."""
    merged: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer.items():
            if key == "parts":  # a part that is off in one engine is not on
                known = merged.setdefault(key, dict(value))
                known.update({p: why for p, why in value.items() if known.get(p) in (None, "on")})
            elif isinstance(value, dict):
                merged[key] = merge_stats([merged.get(key, {}), value])
            elif isinstance(value, int | float) and key != "block_size":
                merged[key] = merged.get(key, 0) + value
            else:
                merged.setdefault(key, value)
    return merged
