"""How much of some prefixes is cached: `POST /v1/sgl/match`.

Owns the envelope, its limits, and what a candidate is in tokens. The lengths are the engines'
(`EngineControl.match`), which count what a request with the same salt and adapter could read, and
change nothing by it. The answer has numbers only.

    {"model": "m", "cache_salt": "...", "prompt": "A shared beginning. ",
     "candidates": ["First document.", "Second document."]}

    {"num_tokens": [9, 10], "cached_tokens": [9, 4]}
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any  # Any: the JSON of a request

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import ValidationError
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, pack
from sgl_vllm.routes.bodies import (
    JSON_ONLY,
    BoundedTokenizeChatRequest,
    BoundedTokenizeCompletionRequest,
    OneSentence,
    check_keys,
    is_prompt,
    is_text_chat,
    is_unicode,
    json_object,
    lora_of,
    one_line,
    optional_text,
    salt_of,
    tokenized,
    unreadable,
)
from sgl_vllm.routes.engines import ask_engines
from sgl_vllm.routes.tenants import NO_TENANTS, TenantSource

router = APIRouter(prefix="/v1/sgl", tags=["sgl-vllm"], route_class=OneSentence)

MAX_CANDIDATES = 256
"""In one call."""

MAX_CHARS = 2 << 20
"""Of all candidates together, each with the shared beginning: about a second of tokenizing."""

MAX_TOKENS = 1 << 20
"""Of all candidates together, each with the shared beginning."""

MAX_TOKENIZING = 1
"""Calls whose texts are tokenized at a time. Other clients' prompts wait for the same tokenizer."""

RADIX_OFF = "the part `radix` is off in this server, and only its tree can match: see /v1/sgl/stats"

_KEYS = {"prompt", "messages", "candidates", "cache_salt", "model"}


def attach(app: FastAPI) -> None:
    """Add the route."""
    app.state.sgl_vllm_matching = asyncio.Semaphore(MAX_TOKENIZING)
    app.include_router(router)


@dataclass(frozen=True, slots=True)
class MatchBody:
    """Prefixes to look up: each of `candidates`, or a shared beginning and one of them after it.

    The beginning is `prompt`, of the same kind as the candidates (text or token ids), or
    `messages`, whose last one the candidates continue. With neither, candidates are whole prompts.
    """

    candidates: list[str] | list[list[int]]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    model: str | None = None


@router.post("/match", dependencies=JSON_ONLY)
async def match(request: Request) -> dict[str, list[int]]:
    """For each candidate, its tokens and how many of them are cached, from the first on.

    With data parallelism, the number is that of the engine that has most of the candidate. 400 for
    a body that cannot be read or is too large, 404 for an unknown model, 409 if no engine has a
    radix tree.
    """
    body = parse_match(await json_object(request))
    client: AsyncLLM = request.app.state.engine_client
    lora = lora_of(request.app.state.openai_serving_models, body.model)
    prefix, packed = await _packed(request, body)
    tenants: TenantSource = getattr(request.app.state, "sgl_vllm_tenants", NO_TENANTS)
    arguments = {
        "candidates": packed,
        "prefix": prefix,
        "cache_salt": tenants.salt(body.cache_salt),  # as of a request with this prefix
        "lora_name": lora.lora_name if lora else None,
        "lora_path": lora.lora_path if lora else None,
    }
    answers = await ask_engines(client, list[int], "match", arguments)
    lengths = [answer for answer in answers if answer is not None]
    if not lengths:
        raise HTTPException(409, RADIX_OFF)
    return {
        "num_tokens": [(len(prefix) + len(one)) // TOKEN_BYTES for one in packed],
        "cached_tokens": [max(of_one) for of_one in zip(*lengths, strict=True)],
    }


# -- the body


def parse_match(body: dict[str, Any]) -> MatchBody:
    """Raises HTTPException 400 with one sentence about what is wrong."""
    check_keys(body, _KEYS)
    prompt, messages = body.get("prompt"), body.get("messages")
    candidates = body.get("candidates")
    if prompt is not None and messages is not None:
        raise HTTPException(400, "give a prompt or messages, not both")
    if prompt is not None and not is_prompt(prompt):
        raise HTTPException(400, "prompt has to be a text or a list of token ids, and not empty")
    if messages is not None and not (is_text_chat(messages) and _ends_in_text(messages)):
        raise HTTPException(
            400,
            "messages has to be a list of messages of text, and the content of the last a text",
        )
    if not isinstance(candidates, list) or not candidates:
        raise HTTPException(400, "candidates has to be a list, and not empty")
    if len(candidates) > MAX_CANDIDATES:
        raise HTTPException(
            400, f"{len(candidates):,} candidates; at most {MAX_CANDIDATES:,} are looked up"
        )
    has_head = prompt is not None or messages is not None
    of_text = messages is not None or isinstance(candidates[0] if prompt is None else prompt, str)
    if of_text:
        is_right = all(_is_text(one, may_be_empty=has_head) for one in candidates)
    else:
        is_right = all((one == [] and has_head) or _is_ids(one) for one in candidates)
    if not is_right:
        kind = "a text" if of_text else "a list of token ids"
        empty = "" if has_head else ", and not empty"
        raise HTTPException(400, f"each of the candidates has to be {kind}{empty}")
    try:
        num_shared = len(prompt or ()) if messages is None else len(json.dumps(messages))
    except RecursionError:
        raise HTTPException(400, "messages are nested too deeply") from None
    size = num_shared * len(candidates) + sum(map(len, candidates))
    limit, unit = (MAX_CHARS, "characters") if of_text else (MAX_TOKENS, "tokens")
    if size > limit:
        raise HTTPException(400, f"the candidates have {size:,} {unit}; at most {limit:,} can be")
    cache_salt, model = salt_of(body), optional_text(body, "model")
    return MatchBody(candidates, prompt, messages, cache_salt, model)


def _ends_in_text(messages: list[dict[str, Any]]) -> bool:
    return isinstance(messages[-1]["content"], str)


def _is_text(value: object, *, may_be_empty: bool) -> bool:
    return isinstance(value, str) and (may_be_empty or bool(value)) and is_unicode(value)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and is_prompt(value)


# -- tokens


async def _packed(request: Request, body: MatchBody) -> tuple[Tokens, list[Tokens]]:
    """The tokens that all candidates begin with, and those of each after them. Texts have theirs as
    vLLM's `/tokenize` has them, with what is before them, so of these the first part is empty."""
    if isinstance(body.candidates[0], list):
        try:
            head = pack(body.prompt) if isinstance(body.prompt, list) else b""
            return head, [pack(one) for one in body.candidates]
        except OverflowError:
            raise HTTPException(400, "a token id has more than 31 bits") from None
    async with request.app.state.sgl_vllm_matching:
        try:
            asked = [_ids(request, body, one) for one in body.candidates]
            return b"", [pack(ids) for ids in await asyncio.gather(*asked)]
        except ValidationError as error:
            raise unreadable("messages", error) from None
        except (VLLMClientError, ValueError) as error:
            raise HTTPException(
                400, f"a candidate cannot be tokenized: {one_line(error)}"
            ) from None


async def _ids(request: Request, body: MatchBody, candidate: str) -> list[int]:
    wanted: BoundedTokenizeChatRequest | BoundedTokenizeCompletionRequest
    if body.messages is None:
        wanted = BoundedTokenizeCompletionRequest(
            model=body.model, prompt=f"{body.prompt or ''}{candidate}"
        )
    else:
        *before, last = body.messages
        last = {**last, "content": last["content"] + candidate}
        wanted = BoundedTokenizeChatRequest(
            model=body.model,
            messages=[*before, last],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    return await tokenized(request, wanted)
