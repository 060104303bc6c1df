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
from typing import Annotated, Any  # Any: the JSON of a request

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, PlainValidator, ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.request_keys import PROGRAM, SCORE_FROM
from sgl_vllm.protocol.scoring import all_answers, scored_rows
from sgl_vllm.routes.batch import complete, counted_as_load
from sgl_vllm.routes.bodies import (
    JSON_ONLY,
    Body,
    BoundedTokenizeChatRequest,
    BoundedTokenizeCompletionRequest,
    Salt,
    Text,
    TokenizeRequest,
    is_text,
    refused,
    router,
    tokenized,
    unreadable,
)

Json = dict[str, Any]

Usage = dict[str, Any]
"""As in an answer of `/v1/completions`."""

_NEXT_TOKEN = {"logprobs": 0, "return_tokens_as_token_ids": True}


NO_MEDIA = (
    "only prompts of text can be scored here: the tokens of an image, a video or a sound do not "
    "say what is in it. Send each continuation as a chat with prompt_logprobs=0, as sgl.select does"
)


def _prompt(value: object) -> Any:
    if not isinstance(value, dict):
        raise ValueError('must be an object with a "prompt" (a text) or "messages"')
    return value


Prompt = Annotated[Json, PlainValidator(_prompt)]


class ScoreBody(Body):
    """`prompt` and each of `continuations`, which is the prompt with a choice after it, are
    requests to vLLM's `/tokenize`. `warm` sends what they share ahead. `cache_salt` is that of the
    requests whose cached prefixes the scores may use, and `program` names the program that they
    belong to (`protocol/hints.py`)."""

    prompt: Prompt
    continuations: Annotated[
        list[Prompt], Field(min_length=1, max_length=scoring.MAX_CONTINUATIONS)
    ]
    unconditional: bool = False
    warm: bool = False
    model: Text | None = None
    request_id: Text | None = None
    cache_salt: Salt | None = None
    program: Annotated[str | int | None, Field(alias=PROGRAM)] = None

    def requests(self) -> list[TokenizeRequest]:
        """The prompt, and the continuations. HTTPException 400 for what cannot be scored."""
        made = [_tokenize_request("prompt", self.prompt, self.model)]
        made += [_tokenize_request("a continuation", one, self.model) for one in self.continuations]
        if not all(begins_with(one, self.prompt) for one in self.continuations):
            raise HTTPException(400, "each continuation must begin with the prompt")
        return made


@router.post("/score", dependencies=JSON_ONLY)
@with_cancellation
async def score(body: ScoreBody, raw_request: Request) -> Response:
    """The tokens of every choice with their log-probabilities, and what each request for them cost.

    400 for a body that cannot be read or scored; what vLLM refuses is answered as vLLM would.
    """
    model = Served(raw_request, body)
    with counted_as_load(raw_request.app.state):
        prefix_ids, *full_ids = await all_answers(
            [tokenized(raw_request, wanted) for wanted in body.requests()]
        )
        try:
            scored = await scoring.score(
                model, prefix_ids, full_ids, unconditional=body.unconditional, warm=body.warm
            )
        except scoring.NothingToScoreError as error:
            raise HTTPException(400, str(error)) from None
    choices = [asdict(choice) for choice in scored.choices]
    return JSONResponse({"choices": choices, "usages": list(scored.costs)})


def _tokenize_request(name: str, prompt: Json, model: str | None) -> TokenizeRequest:
    messages = prompt.get("messages")
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("content") is not None
    ]
    if not all(map(is_text, contents)):
        raise HTTPException(400, NO_MEDIA)
    kind = BoundedTokenizeChatRequest if "messages" in prompt else BoundedTokenizeCompletionRequest
    try:
        return kind.model_validate({**prompt, "model": model})
    except ValidationError as error:
        raise unreadable(name, error) from None


def begins_with(continuation: Json, prompt: Json) -> bool:
    """Whether a continuation is the prompt with something after it, or nothing. Both can be
    tokenized."""
    if "messages" not in prompt:
        return str(continuation.get("prompt", "")).startswith(prompt["prompt"])
    messages, wanted = continuation.get("messages", []), prompt["messages"]
    if not wanted:  # vLLM refuses it
        return True
    *before, last = wanted
    num_before = len(before)
    has_all = len(messages) > num_before and messages[:num_before] == before
    return has_all and _extends(messages[num_before], last)


def _extends(message: Json, wanted: Json) -> bool:
    """Whether a message is the wanted one, or has further text at its end."""
    is_alike = {**message, "content": None} == {**wanted, "content": None}
    return is_alike and _text(message).startswith(_text(wanted))


def _text(message: Json) -> str:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(part["text"] if isinstance(part, dict) else part for part in parts)


# -- the model


@dataclass(frozen=True)
class Served:
    """A `scoring.Model` for one request, behind vLLM's serving objects. It reads the model's name,
    the salt, and the ids of the request and the program from `asked`."""

    request: Request
    asked: ScoreBody

    async def begin_ids(self) -> list[int]:
        wanted = BoundedTokenizeCompletionRequest(model=self.asked.model, prompt="")
        return await tokenized(self.request, wanted)

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

    async def _run(self, body: Json) -> CompletionResponse:
        asked = self.asked
        hints = {} if asked.program is None else {PROGRAM: asked.program}
        own = {"model": asked.model, "request_id": asked.request_id, "cache_salt": asked.cache_salt}
        whole = {**{name: value for name, value in own.items() if value}, **body}
        whole |= {"max_tokens": 1, "temperature": 0.0}
        whole["vllm_xargs"] = {**hints, **body.get("vllm_xargs", {})}
        answer = await complete(self.request, whole)
        if isinstance(answer, ErrorResponse):
            raise refused(answer)
        assert isinstance(answer, CompletionResponse)
        return answer


def _next_token(answer: CompletionResponse) -> Mapping[str, float]:
    rows = answer.choices[0].logprobs
    logprobs = None if rows is None else rows.top_logprobs[0]
    assert logprobs is not None
    return logprobs


def _usage(answer: CompletionResponse) -> Usage:
    return answer.usage.model_dump()
