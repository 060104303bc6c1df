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
from typing import Annotated, Self

from fastapi import HTTPException, Request
from pydantic import Field, model_validator
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, pack
from sgl_vllm.routes.bodies import JSON_ONLY, Prefix, TextOrIds, router
from sgl_vllm.routes.engines import ask_engines

MAX_CANDIDATES = 256
"""In one call."""

MAX_CHARS = 2 << 20
"""Of all candidates together, each with the shared beginning: about a second of tokenizing."""

MAX_TOKENS = 1 << 20
"""Of all candidates together, each with the shared beginning."""

MAX_TOKENIZING = 1
"""Calls whose texts are tokenized at a time. Other clients' prompts wait for the same tokenizer."""

RADIX_OFF = "the part `radix` is off in this server, and only its tree can match: see /v1/sgl/stats"


class MatchBody(Prefix):
    """The prefixes to look up: each of `candidates`, or the prefix and one of them after it. They
    are of the kind of its prompt, or continue the last of its messages."""

    candidates: Annotated[list[TextOrIds], Field(min_length=1, max_length=MAX_CANDIDATES)]

    @model_validator(mode="after")
    def _can_be_looked_up(self) -> Self:
        prompt, messages, candidates = self.prompt, self.messages, self.candidates
        if messages is not None and not isinstance(messages[-1].get("content"), str):
            raise ValueError("messages has to end with one whose content is a text")
        kinds = {*map(type, candidates)}
        if prompt is not None or messages is not None:
            kinds.add(str if prompt is None else type(prompt))
        elif not all(candidates):
            raise ValueError("no candidate can be empty without a prompt or messages")
        if len(kinds) > 1:
            raise ValueError("prompt and candidates must all be texts, or all token ids")
        num_shared = len(prompt or ()) if messages is None else len(json.dumps(messages))
        size = num_shared * len(candidates) + sum(map(len, candidates))
        limit, unit = (MAX_TOKENS, "tokens") if kinds == {list} else (MAX_CHARS, "characters")
        if size > limit:
            raise ValueError(f"the candidates have {size:,} {unit}; at most {limit:,} can be")
        return self


@router.post("/match", dependencies=JSON_ONLY)
async def match(body: MatchBody, request: Request) -> dict[str, list[int]]:
    """For each candidate, its tokens and how many of them are cached, from the first on.

    With data parallelism, the number is that of the engine that has most of the candidate. 400 for
    a body that cannot be read or is too large, 404 for an unknown model, 409 if no engine has a
    radix tree.
    """
    client: AsyncLLM = request.app.state.engine_client
    namespace = body.namespace(request)
    prefix, packed = await _packed(request, body)
    arguments = {"candidates": packed, "prefix": prefix, **namespace}
    answers = await ask_engines(client, list[int], "match", arguments)
    lengths = [answer for answer in answers if answer is not None]
    if not lengths:
        raise HTTPException(409, RADIX_OFF)
    return {
        "num_tokens": [(len(prefix) + len(one)) // TOKEN_BYTES for one in packed],
        "cached_tokens": [max(of_one) for of_one in zip(*lengths, strict=True)],
    }


async def _packed(request: Request, body: MatchBody) -> tuple[Tokens, list[Tokens]]:
    """The tokens that all candidates begin with, and those of each after them. Texts have theirs as
    vLLM's `/tokenize` has them, with what is before them, so of these the first part is empty."""
    if isinstance(body.candidates[0], list):
        before = pack(body.prompt) if isinstance(body.prompt, list) else b""
        return before, [pack(one) for one in body.candidates if isinstance(one, list)]
    async with request.app.state.sgl_vllm_matching:
        asked = [body.token_ids(request, str(one)) for one in body.candidates]
        return b"", [pack(ids) for ids in await asyncio.gather(*asked)]
