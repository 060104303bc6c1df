"""The way from vLLM's API process to our scheduler in every engine's process, and back.

Owns how long an answer may take, and what happens to calls and requests when the engines end first.
The call itself is vLLM's own utility call. A server with data parallelism has several engines, each
with its own cache and its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar  # Any: arguments and answers of several calls

import msgspec
from fastapi import HTTPException
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from sgl_vllm.routes.coalescing import Coalescer
from sgl_vllm.scheduler.stats import EngineStats, merge_stats
from sgl_vllm.vllm_api.patching import wrap

Answer = TypeVar("Answer")

ANSWER_TIMEOUT_S = 60.0
"""An engine answers between two steps, so the limit is far above the time of any step."""

ALIVE_CHECK_S = 0.25
"""How often a call that is under way checks whether an engine is still there to answer it."""


reads: Coalescer[Any] = Coalescer()
"""What routes only read: clients that poll at the same time share an answer, which none may change.
Keys begin with the client."""


async def ask_engines(
    client: AsyncLLM,
    answer_type: type[Answer],
    what: str,
    arguments: dict[str, Any] | None = None,
) -> list[Answer | None]:
    """The answer of `EngineControl.<what>(**arguments)` in each engine behind `client`.

    One answer per engine, in the order of their ranks. None from an engine without the plugin.
    Routes that only read ask by way of `reads`.

    Raises:
        HTTPException: see `answered`.
    """
    call = ("sgl_vllm_call", what) if arguments is None else ("sgl_vllm_call", what, arguments)
    answers = await answered(client, _call_all(client, call))
    return [None if one is None else msgspec.convert(one, answer_type) for one in answers]


async def _call_all(client: AsyncLLM, call: tuple[Any, ...]) -> list[Any]:
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        answers: list[Any] = await core.call_utility_all_async(*call)
        return answers
    return [await core.call_utility_async(*call)]


async def answered(client: AsyncLLM, call: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a utility call to the engines.

    vLLM leaves the future of such a call pending if the engines end before they answer. Without a
    timeout, the route would wait forever and the server could not shut down.

    Raises:
        HTTPException: 503 if the engines have ended, or do not answer in `ANSWER_TIMEOUT_S`.
    """
    task = asyncio.ensure_future(call)
    deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
    try:
        while not (await asyncio.wait([task], timeout=ALIVE_CHECK_S))[0]:
            if client.errored:
                raise HTTPException(503, "the engine has ended")
            if asyncio.get_running_loop().time() > deadline:
                raise HTTPException(
                    503, f"an engine did not answer within {ANSWER_TIMEOUT_S:.0f} s: try again"
                )
        return task.result()
    except Exception as error:
        if client.errored and not isinstance(error, HTTPException):
            raise HTTPException(503, "the engine has ended") from None
        raise
    finally:
        task.cancel()


def end_requests_at_shutdown(client: AsyncLLM) -> list[asyncio.Task[None]]:
    """Let requests end with an error when `client` is shut down. Call it on the server's loop.

    Returns a list for the task that then does so, to be canceled if the loop outlives the server.

    vLLM stops reading the engines' outputs as soon as the engines have ended. The last outputs of a
    request can be lost then. It would wait for them forever, and the server waits for its open
    answers before it ends.
    """
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []  # the loop itself keeps weak references only

    @wrap(client, "shutdown")
    def shutdown(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        # If the loop does not run, nothing waits. vLLM shuts a client down again when it is freed.
        if loop.is_running() and not ending:
            loop.call_soon_threadsafe(begin)

    def begin() -> None:
        if not ending:
            ending.append(loop.create_task(_end_requests(client)))

    return ending


async def _end_requests(client: AsyncLLM) -> None:
    """Runs on: a request can arrive while the engines are being shut down."""
    while True:
        client.output_processor.propagate_error(EngineDeadError())
        await asyncio.sleep(ALIVE_CHECK_S)


def engine_ranks(client: AsyncLLM) -> list[int | None]:
    """What to name in a request that has to run in a certain engine; None if there is only one."""
    num_engines = len(getattr(client.engine_core, "core_engines", ()))
    return list(range(num_engines)) if num_engines > 1 else [None]


async def engine_stats(client: AsyncLLM) -> EngineStats:
    """The merged report of all engines behind `client`."""

    async def ask() -> EngineStats:
        answers = await ask_engines(client, EngineStats, "stats")
        return merge_stats([answer for answer in answers if answer is not None])

    stats: EngineStats = await reads.call((client, "stats"), ask)
    return stats
