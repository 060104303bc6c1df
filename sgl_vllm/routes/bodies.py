"""Reading request bodies: what every route under /v1/sgl/ accepts as JSON and as a prompt.

Owns the errors that these routes share, and how long a prompt can be before it is tokenized. Each
error is a 400 with one sentence. Does not own what a body means, which each route checks itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Self  # Any: the JSON of a request; an error of pydantic's

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from starlette.responses import Response
from vllm.config import ModelConfig
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMClientError, VLLMValidationError
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
            except VLLMValidationError as error:
                raise HTTPException(400, one_line(error)) from None
            except Exception as error:
                if RecursionError in map(type, (error, error.__cause__)):
                    raise HTTPException(400, "the body is nested too deeply") from None
                raise

        return handle


router = APIRouter(prefix="/v1/sgl", tags=["sgl-vllm"], route_class=OneSentence)
"""The modules of this package add their routes to it."""


def _sentence_of(error: Any) -> str:
    """One error of a validation: a text, or what is wrong and where."""
    if isinstance(error, str):
        return error
    if (error["type"], error["loc"]) == ("missing", ("body",)) or error["type"] == "json_invalid":
        return "the body is not JSON"
    place = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    # Beside names and indices, a place has the kinds of pydantic's validators.
    names = [one for one in map(str, place) if re.fullmatch(r"[0-9]+|[a-z_]\w*", one)]
    message = error["msg"].removeprefix("Value error, ")
    return one_line(f"{'.'.join(names)}: {message}".removeprefix(": "))


def one_line(text: object) -> str:
    """The text of an error, which may quote a client, as one line of ASCII for an answer."""
    line = " ".join(str(text)[:MAX_SENTENCE_CHARS].split())
    return line.encode("ascii", "backslashreplace").decode()


class Body(BaseModel):
    """The body of a POST route. Keys other than its fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if unknown := sorted(body.keys() - set(known)):
            hint = did_you_mean(unknown[0], known, f"; the keys are {', '.join(sorted(known))}")
            raise ValueError(f"unknown key {quoted(unknown[0])}{hint}")
        return body


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded. JSON can carry half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_text(content: object) -> bool:
    """Whether the content of a message is text: no images, video or audio."""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        for part in parts
    ]
    return all(isinstance(text, str) and is_unicode(text) for text in texts)


def _text_or_ids(value: object) -> Any:
    if isinstance(value, list):
        is_right = not value or (
            set(map(type, value)) == {int} and 0 <= min(value) <= max(value) < 1 << 31
        )
    else:
        is_right = isinstance(value, str) and is_unicode(value)
    if not is_right:
        raise ValueError("must be a text or a list of token ids below 2**31")
    return value


def _chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages or not all(is_text(message.get("content")) for message in messages):
        raise ValueError("must be a list of messages of text, and not empty")
    return messages


def _salt(salt: str) -> str:
    validate_cache_salt(salt)
    return salt


TextOrIds = Annotated[str | list[int], PlainValidator(_text_or_ids)]
Chat = Annotated[list[dict[str, Any]], AfterValidator(_chat)]
Text = Annotated[str, Field(min_length=1)]
Salt = Annotated[Text, AfterValidator(_salt)]


class Prefix(Body):
    """What prompts begin with: a `prompt` (text or token ids), the `messages` of a chat, or, where
    a route takes that, neither. `cache_salt` and `model` are those of the requests."""

    prompt: Annotated[TextOrIds, Field(min_length=1)] | None = None
    messages: Chat | None = None
    cache_salt: Salt | None = None
    model: Text | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either a prompt or messages, not both")
        return self

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

    async def token_ids(self, request: Request, continuation: str | None = None) -> list[int]:
        """The tokens of the text or chat, or of it with `continuation` at its end. HTTPException
        for one that cannot be tokenized."""
        wanted: TokenizeRequest
        try:
            if self.messages is None:
                prompt = f"{self.prompt or ''}{continuation or ''}"
                wanted = BoundedTokenizeCompletionRequest(model=self.model, prompt=prompt)
            else:
                *before, last = self.messages
                if continuation is not None:
                    last = {**last, "content": last["content"] + continuation}
                wanted = BoundedTokenizeChatRequest(
                    model=self.model,
                    messages=[*before, last],
                    add_generation_prompt=False,
                    continue_final_message=continuation is not None,
                )
            return await tokenized(request, wanted)
        except ValidationError as error:
            raise unreadable("messages", error) from None
        except (VLLMClientError, ValueError) as error:
            raise HTTPException(400, f"this cannot be tokenized: {one_line(error)}") from None


class _Bounded:
    """A request to vLLM's `/tokenize` for a prompt that the model is to run.

    `/tokenize` accepts a text of any length. This refuses one that cannot fit into the model's
    context, by its number of characters, before it is tokenized.
    """

    add_special_tokens: bool

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return TokenizeParams(
            max_total_tokens=model_config.max_model_len, add_special_tokens=self.add_special_tokens
        )


class BoundedTokenizeCompletionRequest(_Bounded, TokenizeCompletionRequest):
    """Such a request for a text."""


class BoundedTokenizeChatRequest(_Bounded, TokenizeChatRequest):
    """Such a request for the messages of a chat."""


TokenizeRequest = BoundedTokenizeChatRequest | BoundedTokenizeCompletionRequest


async def tokenized(request: Request, wanted: TokenizeRequest) -> list[int]:
    """The token ids of a prompt, by vLLM's own `/tokenize`, so that special tokens and the chat
    template are the same.

    Raises:
        HTTPException: what vLLM answers to a prompt that cannot be tokenized.
    """
    answer = await request.app.state.serving_tokenization.create_tokenize(wanted, request)
    if isinstance(answer, ErrorResponse):
        raise refused(answer)
    tokens: list[int] = answer.tokens
    return tokens


def refused(answer: ErrorResponse) -> HTTPException:
    """What vLLM has answered."""
    return HTTPException(answer.error.code, answer.error.message)


def unreadable(name: str, error: ValidationError) -> HTTPException:
    """400 for something, such as messages, that vLLM cannot read."""
    first = error.errors(include_input=False, include_url=False)[0]
    return HTTPException(400, f"{name} cannot be read: {_sentence_of(first)}")
