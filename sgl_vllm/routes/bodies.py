"""Reading request bodies: what every route under /v1/sgl/ accepts as JSON and as a prompt.

Owns the errors that these routes share, and how long a prompt can be before it is tokenized. Each
error is a 400 with one sentence. Does not own what a body means, which each route checks itself.
"""

from __future__ import annotations

from typing import Any  # Any: the JSON of a request

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect
from vllm.config import ModelConfig
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.renderers import TokenizeParams

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
