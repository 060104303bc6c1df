"""Reading request bodies: what every route under /v1/sgl/ accepts as JSON and as a prompt.

Owns the errors that these routes share, and how long a prompt can be before it is tokenized. Each
error is a 400 with one sentence. Does not own what a body means, which each route checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any  # Any: the JSON of a request; an error of pydantic's

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from vllm.config import ModelConfig
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.renderers import TokenizeParams

from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.routes.tenants import tenants_of
from sgl_vllm.spelling import did_you_mean

JSON_ONLY = [Depends(validate_json_request)]
"""Dependencies of every POST route: a 400 unless the content type is JSON, as on vLLM's own routes.
A browser asks the server before it sends JSON from another site's page. It sends text and forms
without asking."""

MAX_SENTENCE_CHARS = 300


class OneSentence(APIRoute):
    """A route that refuses content types and parameters with one sentence, not a list of errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await original(request)
            except RequestValidationError as error:
                raise HTTPException(400, _sentence_of(error.errors()[0])) from None

        return handle


router = APIRouter(prefix="/v1/sgl", tags=["sgl-vllm"], route_class=OneSentence)
"""The modules of this package add their routes to it."""


def _sentence_of(error: Any) -> str:
    """One error of a validation: a text, or what is wrong and where."""
    if isinstance(error, str):
        return error
    # Beside names and indices, a place has the kinds of pydantic's validators.
    names = [one for one in map(str, error["loc"]) if one.isidentifier() or one.isdecimal()]
    return one_line(f"{'.'.join(names)}: {error['msg']}".removeprefix(": "))


def one_line(text: object) -> str:
    """The text of an error, which may quote a client, as one line of ASCII for an answer."""
    line = " ".join(str(text)[:MAX_SENTENCE_CHARS].split())
    return line.encode("ascii", "backslashreplace").decode()


def check_keys(body: dict[str, Any], known: Collection[str]) -> None:
    """Raises HTTPException 400 with one sentence if `body` has a key that is not among `known`."""
    if unknown := sorted(body.keys() - set(known)):
        hint = did_you_mean(unknown[0], known, f"; the keys are {', '.join(sorted(known))}")
        raise HTTPException(400, f"unknown key {quoted(unknown[0])}{hint}")


NOT_AN_OBJECT = "the body has to be a JSON object"


async def json_object(request: Request) -> dict[str, Any]:
    """The body of `request`.

    Raises:
        HTTPException: 400 if the body is not a JSON object, is nested too deeply to be read, or
            was cut off because the client closed the connection.
    """
    try:
        body = await request.json()
    except ClientDisconnect:
        raise HTTPException(400, "the client closed the connection before its body ended") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, NOT_AN_OBJECT)
    return body


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded. JSON can carry half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_prompt(prompt: object) -> bool:
    """Whether `prompt` is a text or a list of token ids, and not empty."""
    if isinstance(prompt, list):
        return set(map(type, prompt)) == {int} and min(prompt) >= 0
    return isinstance(prompt, str) and bool(prompt) and is_unicode(prompt)


def is_text_chat(messages: object) -> bool:
    """Whether `messages` is a list of messages of text, and not empty."""
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        parts = message.get("content")
        if isinstance(parts, str) and is_unicode(parts):
            continue
        if not isinstance(parts, list) or not all(_is_text_part(part) for part in parts):
            return False
    return True


def _is_text_part(part: object) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    text = part.get("text")
    return isinstance(text, str) and is_unicode(text)


def has_media(prompt: dict[str, Any]) -> bool:
    """Whether a prompt is a chat with anything but text: images, video, audio. For messages that
    vLLM is to read, and may find malformed."""
    messages = prompt.get("messages")
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


def optional_text(body: dict[str, Any], name: str) -> str | None:
    """The text at `name` of a body, None if there is none.

    Raises:
        HTTPException: 400 for anything else.
    """
    value = body.get(name)
    if value is None or (isinstance(value, str) and value and is_unicode(value)):
        return value
    raise HTTPException(400, f"{name} has to be a text, and not empty")


def salt_of(body: dict[str, Any]) -> str | None:
    """The `cache_salt` of a body, which is as vLLM's own routes take it.

    Raises:
        HTTPException: 400 for any other.
    """
    salt = optional_text(body, "cache_salt")
    check_salt(salt)
    return salt


def check_salt(salt: str | None) -> None:
    """Raises HTTPException 400 for a salt that vLLM's own routes refuse."""
    try:
        validate_cache_salt(salt)
    except VLLMValidationError as error:
        raise HTTPException(400, str(error)) from None


@dataclass(frozen=True, slots=True)
class Prefix:
    """What prompts begin with: a `prompt` (text or token ids), the `messages` of a chat, or, where
    a route takes that, neither. `cache_salt` and `model` are those of the requests."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    cache_salt: str | None
    model: str | None

    @classmethod
    def read(cls, body: dict[str, Any], *further_keys: str) -> Prefix:
        """Raises HTTPException 400 with one sentence about what is wrong."""
        check_keys(body, {"prompt", "messages", "cache_salt", "model", *further_keys})
        prompt, messages = body.get("prompt"), body.get("messages")
        if prompt is not None and messages is not None:
            raise HTTPException(400, "give either a prompt or messages, not both")
        if prompt is not None and not is_prompt(prompt):
            raise HTTPException(
                400, "prompt has to be a text or a list of token ids, and not empty"
            )
        if messages is not None and not is_text_chat(messages):
            raise HTTPException(400, "messages has to be a list of messages of text, and not empty")
        return cls(prompt, messages, salt_of(body), optional_text(body, "model"))

    def lora(self, request: Request) -> LoRARequest | None:
        """The adapter that `model` stands for; None for the base model. HTTPException 404 for a
        name that the server does not know."""
        models = request.app.state.openai_serving_models
        if self.model is None or models.is_base_model(self.model):
            return None
        if self.model not in models.lora_requests:
            raise HTTPException(404, f"this server has no model {quoted(self.model)}")
        lora: LoRARequest = models.lora_requests[self.model]
        return lora

    def namespace(self, request: Request) -> dict[str, str | None]:
        """Arguments of `EngineControl` that say whose cached prefixes count: salt and adapter, as
        those of a request from this client."""
        lora = self.lora(request)
        return {
            "cache_salt": tenants_of(request.app).salt(self.cache_salt),
            "lora_name": lora.lora_name if lora else None,
            "lora_path": lora.lora_path if lora else None,
        }


class BoundedTokenizeCompletionRequest(TokenizeCompletionRequest):
    """A request to vLLM's `/tokenize` for a prompt that the model is to run.

    `/tokenize` accepts a text of any length. This refuses one that cannot fit into the model's
    context, by its number of characters, before it is tokenized.
    """

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _bounded(model_config, self.add_special_tokens)


class BoundedTokenizeChatRequest(TokenizeChatRequest):
    """The same for the messages of a chat."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _bounded(model_config, self.add_special_tokens)


def _bounded(model_config: ModelConfig, add_special_tokens: bool) -> TokenizeParams:
    return TokenizeParams(
        max_total_tokens=model_config.max_model_len, add_special_tokens=add_special_tokens
    )


async def tokenized(
    request: Request, wanted: BoundedTokenizeChatRequest | BoundedTokenizeCompletionRequest
) -> list[int]:
    """The token ids of a prompt, by vLLM's own `/tokenize`, so that special tokens and the chat
    template are the same.

    Raises:
        HTTPException: what vLLM answers to a prompt that cannot be tokenized.
    """
    answer = await request.app.state.serving_tokenization.create_tokenize(wanted, request)
    if isinstance(answer, ErrorResponse):
        raise HTTPException(answer.error.code, answer.error.message)
    tokens: list[int] = answer.tokens
    return tokens


def unreadable(name: str, error: ValidationError) -> HTTPException:
    """400 for something, such as messages, that vLLM cannot read."""
    first = error.errors(include_input=False, include_url=False)[0]
    return HTTPException(400, f"{name} cannot be read: {_sentence_of(first)}")
