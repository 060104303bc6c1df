"""Pins: prefixes that stay in the cache until they are unpinned.

Owns the routes, and what a prompt is in tokens. The engines own the pins. With data parallelism a
prefix is computed and pinned in every engine, because any of them may get the next request: all
engines pin, or none does.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict
from typing import Any  # Any: the JSON of a request

from fastapi import HTTPException, Request
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.routes.bodies import JSON_ONLY, Body, Prefix, Text, one_line, router
from sgl_vllm.routes.engines import ask_engines, engine_ranks, reads
from sgl_vllm.scheduler.control import ListedPin, PinAnswer

ID_SEPARATOR = ","
"""Between the engines' pin ids in the one id that a client sees."""

MAX_PIN_ID_LENGTH = 64
"""The longest pin id of one engine."""

MAX_COMPUTING = 1
"""Prefixes that are computed to be pinned at a time. A client that pins many at once would fill
every step with their prompts, and other clients' requests would wait for these steps."""

RADIX_OFF = "the part `radix` is off in this server, and only its tree can pin: see /v1/sgl/stats"


@router.post("/pin", dependencies=JSON_ONLY)
async def pin(body: Prefix, request: Request) -> dict[str, Any]:
    """Compute a prefix and one more token, and pin the prefix in every engine.

    400 for a body that cannot be pinned, 404 for an unknown model, 409 with the engine's reason.
    """
    client: AsyncLLM = request.app.state.engine_client
    lora = body.lora(request)
    if body.prompt is None and body.messages is None:
        raise HTTPException(400, "give either a prompt or messages")
    # What a request with this prompt, or a chat that goes on from it, begins with.
    tokens = body.prompt if isinstance(body.prompt, list) else await body.token_ids(request)
    if not tokens:
        raise HTTPException(400, "this prompt has no tokens")
    try:
        async with request.app.state.sgl_vllm_pinning:
            computing = (
                compute(client, tokens, body.cache_salt, lora, rank)
                for rank in engine_ranks(client)
            )
            await asyncio.gather(*computing)
    except (VLLMClientError, ValueError) as error:
        raise HTTPException(400, f"this prefix cannot be computed: {one_line(error)}") from None
    arguments = {"token_ids": tokens, **body.namespace(request)}
    asked = await ask_engines(client, PinAnswer, "pin", arguments)
    answers = [answer or PinAnswer(error=RADIX_OFF) for answer in asked]
    pins = [answer.pinned for answer in answers if answer.pinned is not None]
    pin_ids = [pin.pin_id for pin in pins]
    if refusals := [answer.error for answer in answers if answer.pinned is None]:
        await _unpin(client, pin_ids)
        raise HTTPException(409, refusals[0])
    return {
        "pin_id": ID_SEPARATOR.join(pin_ids),
        "num_prompt_tokens": len(tokens),
        "pins": [asdict(pin) for pin in pins],
    }


class UnpinBody(Body):
    pin_id: Text


@router.post("/unpin", dependencies=JSON_ONLY)
async def unpin(body: UnpinBody, request: Request) -> dict[str, bool]:
    """Let a pinned prefix be evicted again. 404 if no engine knows the id."""
    pin_id = body.pin_id
    client: AsyncLLM = request.app.state.engine_client
    # An id has a part for each engine. Further parts would cost a call each, to no effect.
    num_parts = len(engine_ranks(client))
    max_length = num_parts * (MAX_PIN_ID_LENGTH + len(ID_SEPARATOR))
    if len(pin_id) > max_length or pin_id.count(ID_SEPARATOR) >= num_parts:
        raise HTTPException(400, "pin_id must be one that /v1/sgl/pin answered")
    if not await _unpin(client, pin_id.split(ID_SEPARATOR)):
        raise HTTPException(404, f"there is no pin {quoted(pin_id)}")
    return {"unpinned": True}


@router.get("/pins")
async def pins(request: Request) -> dict[str, Any]:
    """What is pinned in each engine: sizes and ages, no text."""
    client: AsyncLLM = request.app.state.engine_client
    engines = await reads.call(
        (client, "pins"), lambda: ask_engines(client, list[ListedPin], "pins")
    )
    return {"engines": [{"pins": [asdict(pin) for pin in pins or ()]} for pins in engines]}


async def _unpin(client: AsyncLLM, pin_ids: list[str]) -> bool:
    """Whether any engine knew any of them. Each is asked for all: an id is one engine's."""
    answers = [await ask_engines(client, bool, "unpin", {"pin_id": pin_id}) for pin_id in pin_ids]
    return any(was_pinned for engines in answers for was_pinned in engines)


async def compute(
    client: AsyncLLM,
    tokens: list[int],
    cache_salt: str | None,
    lora: LoRARequest | None,
    rank: int | None,
) -> None:
    """Run `tokens` through the engine of that rank, so that its cache holds all of them."""
    running = client.generate(
        tokens_input(tokens, cache_salt=cache_salt),
        SamplingParams(temperature=0.0, max_tokens=1),
        f"sgl-pin-{uuid.uuid4().hex}",
        lora_request=lora,
        data_parallel_rank=rank,
    )
    async for _ in running:
        pass
