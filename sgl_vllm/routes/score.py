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

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.request_keys import PROGRAM, SCORE_FROM
from sgl_vllm.protocol.scoring import all_answers, scored_rows
from sgl_vllm.routes.batch import complete, counted_as_load, error_answer, handled
from sgl_vllm.routes.bodies import (
    JSON_ONLY,
    BoundedTokenizeChatRequest,
    BoundedTokenizeCompletionRequest,
    check_keys,
    has_media,
    json_object,
    optional_text,
    router,
    salt_of,
    unreadable,
)

Json = dict[str, Any]

Usage = dict[str, Any]
"""As in an answer of `/v1/completions`."""

_KEYS = {
    *("model", "prompt", "continuations", "unconditional", "warm", "cache_salt", "request_id"),
    PROGRAM,
}

_PROMPTS = '{"prompt": "..."} or {"messages": [...]}'
_A_PROMPT = f"an object {_PROMPTS}"

_NEXT_TOKEN = {"logprobs": 0, "return_tokens_as_token_ids": True}


NO_MEDIA = (
    "only prompts of text can be scored here: the tokens of an image, a video or a sound do not "
    "say what is in it. Send each continuation as a chat with prompt_logprobs=0, as sgl.select does"
)


TokenizeRequest = BoundedTokenizeChatRequest | BoundedTokenizeCompletionRequest


@dataclass(frozen=True, slots=True)
class ScoreBody:
    """`prompt` and each of `continuations`, which is the prompt with a choice after it, are
    requests to vLLM's `/tokenize`. `warm` sends what they share ahead. `cache_salt` is that of the
    requests whose cached prefixes the scores may use, and `program` names the program that they
    belong to (`protocol/hints.py`)."""

    prompt: TokenizeRequest
    continuations: list[TokenizeRequest]
    unconditional: bool
    warm: bool
    model: str | None
    request_id: str | None
    cache_salt: str | None
    program: str | int | None


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
    return await _score(parse_score(await json_object(request)), request)


@with_cancellation
async def _score(asked: ScoreBody, raw_request: Request) -> Response:
    with counted_as_load(raw_request.app.state):
        try:
            hints = {} if asked.program is None else {PROGRAM: asked.program}
            model = _Served(raw_request, asked.model, asked.request_id, asked.cache_salt, hints)
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


# -- the body


def parse_score(body: Json) -> ScoreBody:
    """Raises HTTPException 400 with one sentence about what is wrong."""
    check_keys(body, _KEYS)
    model = optional_text(body, "model")
    try:
        prompt, continuations = _prompts_of(body)
        requests = [_tokenize_request("prompt", prompt, model)]
        requests += [_tokenize_request("a continuation", one, model) for one in continuations]
        if not all(begins_with(one, prompt) for one in continuations):
            raise HTTPException(400, "each continuation must begin with the prompt")
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    return ScoreBody(
        requests[0],
        requests[1:],
        _flag(body, "unconditional"),
        _flag(body, "warm"),
        model,
        optional_text(body, "request_id"),
        salt_of(body),
        _program_of(body),
    )


def _prompts_of(body: Json) -> tuple[Json, list[Json]]:
    prompt, continuations = body.get("prompt"), body.get("continuations")
    if not isinstance(prompt, dict):
        raise HTTPException(400, f"prompt must be {_A_PROMPT}")
    if not isinstance(continuations, list) or not continuations:
        raise HTTPException(400, f"continuations must be a list of one or more objects {_PROMPTS}")
    if len(continuations) > scoring.MAX_CONTINUATIONS:
        most = f"at most {scoring.MAX_CONTINUATIONS:,} are scored"
        raise HTTPException(400, f"{len(continuations):,} continuations; {most}")
    if not all(isinstance(one, dict) for one in continuations):
        raise HTTPException(400, f"each continuation must be {_A_PROMPT}")
    if any(map(has_media, (prompt, *continuations))):
        raise HTTPException(400, NO_MEDIA)
    return prompt, continuations


def _program_of(body: Json) -> str | int | None:
    program = body.get(PROGRAM)
    if program is None or (isinstance(program, str | int) and not isinstance(program, bool)):
        return program
    raise HTTPException(400, f"{PROGRAM} must be a string or an integer")


def _flag(body: Json, name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise HTTPException(400, f"{name} must be true or false")
    return value


def _tokenize_request(name: str, prompt: Json, model: str | None) -> TokenizeRequest:
    is_chat = "messages" in prompt
    kind = BoundedTokenizeChatRequest if is_chat else BoundedTokenizeCompletionRequest
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
    if not isinstance(content, list):
        return str(content)
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise HTTPException(400, "the content of a message must be a string or a list of texts")
    return "".join(known)


# -- the model


@dataclass(frozen=True)
class _Served:
    """The model behind vLLM's serving objects, for one request; `scoring.Model`."""

    request: Request
    model: str | None
    request_id: str | None
    cache_salt: str | None
    hints: Mapping[str, str | int]

    async def tokenize(self, prompt: TokenizeRequest) -> list[int]:
        handler = self.request.app.state.serving_tokenization
        answer = await handler.create_tokenize(prompt, self.request)
        if isinstance(answer, ErrorResponse):
            raise Refused(answer)
        return list(answer.tokens)

    async def begin_ids(self) -> list[int]:
        return await self.tokenize(BoundedTokenizeCompletionRequest(model=self.model, prompt=""))

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
        whole["vllm_xargs"] = {**self.hints, **body.get("vllm_xargs", {})}
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
