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
from typing import Any  # Any: the JSON of a request

from fastapi import HTTPException, Request
from pydantic import ValidationError
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, pack
from sgl_vllm.routes.bodies import (
    JSON_ONLY,
    BoundedTokenizeChatRequest,
    BoundedTokenizeCompletionRequest,
    Prefix,
    is_prompt,
    is_unicode,
    json_object,
    one_line,
    router,
    tokenized,
    unreadable,
)
from sgl_vllm.routes.engines import ask_engines

MAX_CANDIDATES = 256
"""In one call."""

MAX_CHARS = 2 << 20
"""Of all candidates together, each with the shared beginning: about a second of tokenizing."""

MAX_TOKENS = 1 << 20
"""Of all candidates together, each with the shared beginning."""

MAX_TOKENIZING = 1
"""Calls whose texts are tokenized at a time. Other clients' prompts wait for the same tokenizer."""

Candidates = list[str] | list[list[int]]

RADIX_OFF = "the part `radix` is off in this server, and only its tree can match: see /v1/sgl/stats"


@router.post("/match", dependencies=JSON_ONLY)
async def match(request: Request) -> dict[str, list[int]]:
    """For each candidate, its tokens and how many of them are cached, from the first on.

    With data parallelism, the number is that of the engine that has most of the candidate. 400 for
    a body that cannot be read or is too large, 404 for an unknown model, 409 if no engine has a
    radix tree.
    """
    body = await json_object(request)
    head = Prefix.read(body, "candidates")
    candidates = parse_candidates(body.get("candidates"), head)
    client: AsyncLLM = request.app.state.engine_client
    namespace = head.namespace(request)
    prefix, packed = await _packed(request, head, candidates)
    arguments = {"candidates": packed, "prefix": prefix, **namespace}
    answers = await ask_engines(client, list[int], "match", arguments)
    lengths = [answer for answer in answers if answer is not None]
    if not lengths:
        raise HTTPException(409, RADIX_OFF)
    return {
        "num_tokens": [(len(prefix) + len(one)) // TOKEN_BYTES for one in packed],
        "cached_tokens": [max(of_one) for of_one in zip(*lengths, strict=True)],
    }


# -- the body


def parse_candidates(candidates: Any, head: Prefix) -> Candidates:
    """The prefixes to look up: each of `candidates`, or `head` and one of them after it. They are
    of the kind of its prompt, or continue the last of its messages.

    Raises HTTPException 400 with one sentence about what is wrong.
    """
    prompt, messages = head.prompt, head.messages
    if messages is not None and not isinstance(messages[-1]["content"], str):
        raise HTTPException(400, "messages has to end with one whose content is a text")
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
    return candidates


def _is_text(value: object, *, may_be_empty: bool) -> bool:
    return isinstance(value, str) and (may_be_empty or bool(value)) and is_unicode(value)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and is_prompt(value)


# -- tokens


async def _packed(
    request: Request, head: Prefix, candidates: Candidates
) -> tuple[Tokens, list[Tokens]]:
    """The tokens that all candidates begin with, and those of each after them. Texts have theirs as
    vLLM's `/tokenize` has them, with what is before them, so of these the first part is empty."""
    if isinstance(candidates[0], list):
        try:
            before = pack(head.prompt) if isinstance(head.prompt, list) else b""
            return before, [pack(one) for one in candidates]
        except OverflowError:
            raise HTTPException(400, "a token id has more than 31 bits") from None
    async with request.app.state.sgl_vllm_matching:
        try:
            asked = [_ids(request, head, str(one)) for one in candidates]
            return b"", [pack(ids) for ids in await asyncio.gather(*asked)]
        except ValidationError as error:
            raise unreadable("messages", error) from None
        except (VLLMClientError, ValueError) as error:
            raise HTTPException(
                400, f"a candidate cannot be tokenized: {one_line(error)}"
            ) from None


async def _ids(request: Request, head: Prefix, candidate: str) -> list[int]:
    wanted: BoundedTokenizeChatRequest | BoundedTokenizeCompletionRequest
    if head.messages is None:
        wanted = BoundedTokenizeCompletionRequest(
            model=head.model, prompt=f"{head.prompt or ''}{candidate}"
        )
    else:
        *before, last = head.messages
        last = {**last, "content": last["content"] + candidate}
        wanted = BoundedTokenizeChatRequest(
            model=head.model,
            messages=[*before, last],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    return await tokenized(request, wanted)
