"""Scores of a prompt's continuations in one request: `POST /v1/sgl/score`, for the language's
`select`.

Owns the envelope. How scores are got is `protocol.scoring`; tokens and log-probabilities are what
vLLM's own serving objects answer, their errors included. Without this route a client sends the
same requests itself, and each prompt several times.

    {"model": "m", "prompt": {...}, "continuations": [{...}, {...}], "unconditional": false,
     "warm": true, "cache_salt": "..."}

    {"choices": [{"token_ids": [7], "logprobs": [-0.2], "unconditional_logprobs": null}, ...],
     "usages": [{...}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any  # Any: the JSON of a request

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.protocol.scoring import all_answers, scored_rows
from sgl_vllm.routes.batch import complete, counted_as_load, error_answer, handled, parsed
from sgl_vllm.routes.bodies import (
    JSON_ONLY,
    BoundedTokenizeChatRequest,
    BoundedTokenizeCompletionRequest,
    has_media,
    json_object,
)

router = APIRouter(prefix="/v1/sgl", tags=["sgl-vllm"])

Usage = dict[str, Any]
"""As in an answer of `/v1/completions`."""

_NEXT_TOKEN = {"logprobs": 0, "return_tokens_as_token_ids": True}


NO_MEDIA = (
    "only prompts of text can be scored here: the tokens of an image, a video or a sound do not "
    "say what is in it. Send each continuation as a chat with prompt_logprobs=0, as sgl.select does"
)


class ScoreRequest(BaseModel):
    """`prompt` and each of `continuations`, which is the prompt with a choice after it, are bodies
    of vLLM's `/tokenize`. `warm` sends what they share ahead. `cache_salt` is that of the requests
    whose cached prefixes the scores may use."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    prompt: dict[str, Any]
    continuations: list[dict[str, Any]] = Field(min_length=1, max_length=scoring.MAX_CONTINUATIONS)
    unconditional: bool = False
    warm: bool = False


class Refused(Exception):
    """vLLM answered a part with an error."""

    def __init__(self, error: ErrorResponse) -> None:
        super().__init__(error.error.message)
        self.error = error


@router.post("/score", dependencies=JSON_ONLY)
async def score(request: Request) -> Response:
    """The tokens of every choice with their log-probabilities, and what each request for them cost.

    400 for a body that cannot be read or scored; what vLLM refuses is answered as vLLM would.
    """
    return await _score(await json_object(request), request)


@with_cancellation
async def _score(body: dict[str, Any], raw_request: Request) -> Response:
    with counted_as_load(raw_request.app.state):
        try:
            asked = parsed(ScoreRequest, body)
            if any(map(has_media, (asked.prompt, *asked.continuations))):
                raise HTTPException(400, NO_MEDIA)
            model = _Served(raw_request, asked.model, asked.request_id, asked.cache_salt)
            prefix_ids, *full_ids = await all_answers(
                [model.tokenize(prompt) for prompt in (asked.prompt, *asked.continuations)]
            )
            scored = await scoring.score(
                model, prefix_ids, full_ids, unconditional=asked.unconditional, warm=asked.warm
            )
        except Refused as refused:
            return error_answer(refused.error)
        except scoring.NothingToScoreError as error:
            return await handled(raw_request, HTTPException(400, str(error)))
        except Exception as error:
            return await handled(raw_request, error)
    choices = [asdict(choice) for choice in scored.choices]
    return JSONResponse({"choices": choices, "usages": list(scored.costs)})


@dataclass(frozen=True)
class _Served:
    """The model behind vLLM's serving objects, for one request; `scoring.Model`."""

    request: Request
    model: str | None
    request_id: str | None
    cache_salt: str | None

    async def tokenize(self, prompt: dict[str, Any]) -> list[int]:
        is_chat = "messages" in prompt
        kind = BoundedTokenizeChatRequest if is_chat else BoundedTokenizeCompletionRequest
        handler = self.request.app.state.serving_tokenization
        asked = parsed(kind, {**prompt, "model": self.model})
        answer = await handler.create_tokenize(asked, self.request)
        if isinstance(answer, ErrorResponse):
            raise Refused(answer)
        return list(answer.tokens)

    async def begin_ids(self) -> list[int]:
        return await self.tokenize({"prompt": ""})

    async def warm_ids(self, ids: list[int]) -> Usage:
        return _usage(await self._run({"prompt": ids}))

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        answer = await self._run(
            {"prompt": sequences, "prompt_logprobs": 0, "vllm_xargs": {SCORE_FROM: start}}
        )
        rows = [
            tuple(
                row[token].logprob
                for row, token in scored_rows(choice.prompt_logprobs or [], ids[start:])
                if row is not None
            )
            for choice, ids in zip(answer.choices, sequences, strict=True)
        ]
        return rows, _usage(answer)

    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], list[Usage]] | None:
        """One request for them all: vLLM returns the log-probabilities of given tokens beside that
        of the token that it generates."""
        config = self.request.app.state.openai_serving_completion.model_config
        if config.logprobs_mode != "raw_logprobs":  # others are of what may be generated
            return None
        answers = await all_answers(
            [
                self._run({**_NEXT_TOKEN, "prompt": ids, "logprob_token_ids": some})
                for some in scoring.in_requests(tokens)
            ]
        )
        logprobs = {key: value for answer in answers for key, value in _next_token(answer).items()}
        return [logprobs[f"token_id:{token}"] for token in tokens], [_usage(one) for one in answers]

    async def _run(self, body: dict[str, Any]) -> CompletionResponse:
        own = {"request_id": self.request_id, "cache_salt": self.cache_salt}
        given = {name: value for name, value in own.items() if value}
        whole = {"model": self.model, **given, **body, "max_tokens": 1, "temperature": 0.0}
        answer = await complete(self.request, whole)
        if isinstance(answer, ErrorResponse):
            raise Refused(answer)
        assert isinstance(answer, CompletionResponse)
        return answer


def _next_token(answer: CompletionResponse) -> Mapping[str, float]:
    rows = answer.choices[0].logprobs
    logprobs = None if rows is None else rows.top_logprobs[0]
    assert logprobs is not None
    return logprobs


def _usage(answer: CompletionResponse) -> Usage:
    return answer.usage.model_dump()
