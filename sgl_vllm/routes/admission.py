"""What is refused of a request before it is sent to an engine: a 400 with one sentence.

Owns texts and numbers that cannot be sent, the length of the names that engines keep after the
request, and the use of the plugin's own keys in `vllm_xargs`. Does not own hints, which are ignored
if they are not valid (`protocol/hints.py`), nor formats (`fsm/vllm/frontend.py`). No message quotes
a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: whatever a field holds; arguments of vLLM's

import msgspec
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from sgl_vllm.protocol.request_ids import MAX_ID_CHARS
from sgl_vllm.protocol.request_keys import ANY, COMPACT, SCORE_FROM, WHITESPACE, WHITESPACES
from sgl_vllm.protocol.scoring import check_score_from
from sgl_vllm.protocol.segments import check_reuse
from sgl_vllm.routes.bodies import is_unicode

MAX_ADAPTER_CHARS = 512
"""The longest name of a LoRA adapter."""

MAX_PATH_CHARS = 4096
"""The longest path of a LoRA adapter."""

_SENT = ("request_id", "session_id", "reasoning_parser_kwargs", "kv_hints")
"""Fields that a client's values reach, in some versions of vLLM."""


def check_params(params: object) -> None:
    """Raises VLLMValidationError for parameters that cannot be sent. To be called before vLLM reads
    them: it answers 500 to a bad word that it cannot tokenize."""
    if not isinstance(params, SamplingParams):
        return
    if not all(map(is_unicode, (*(params.stop or ()), *(params.bad_words or ())))):
        raise VLLMValidationError(
            "stop and bad_words must be valid Unicode: remove the unpaired surrogate"
        )
    if params.extra_args:
        _check_sendable("vllm_xargs", params.extra_args)
        _check(check_reuse, params.extra_args)
        if params.extra_args.get(WHITESPACE, ANY) not in [*WHITESPACES]:  # it may be a list
            raise VLLMValidationError(f"{WHITESPACE} must be one of {', '.join(WHITESPACES)}")


def check_request(request: EngineCoreRequest) -> None:
    """Raises VLLMValidationError, as `check_params` does, for what is known of a request once vLLM
    has processed it. Its salt is still the client's own."""
    validate_cache_salt(request.cache_salt)
    _check_length("request_id, with what vLLM adds to it,", request.request_id, MAX_ID_CHARS)
    if (lora := request.lora_request) is not None:
        _check_length("the name of the LoRA adapter", lora.lora_name, MAX_ADAPTER_CHARS)
        _check_length("the path of the LoRA adapter", lora.lora_path, MAX_PATH_CHARS)
    for name in ("cache_salt", *_SENT):
        _check_sendable(name, getattr(request, name, None))
    params = request.sampling_params
    if params is not None and params.extra_args and SCORE_FROM in params.extra_args:
        embeds = request.prompt_embeds
        num_tokens = len(request.prompt_token_ids or ()) if embeds is None else len(embeds)
        has_logprobs = params.prompt_logprobs is not None
        _check(
            check_score_from, params.extra_args[SCORE_FROM], num_tokens, has_logprobs=has_logprobs
        )


def check_body(request: ChatCompletionRequest | CompletionRequest) -> None:
    """Check the fields of a body that engines do not get. Refuse `SCORE_FROM` with `echo`: vLLM
    fails on the missing rows of the echoed prompt. Read `disable_any_whitespace` in a
    `response_format`, where vLLM ignores it."""
    if getattr(request, "echo", None) and SCORE_FROM in (request.vllm_xargs or ()):
        raise VLLMValidationError(
            f"{SCORE_FROM} cannot be combined with echo, because only log-probabilities from "
            "that token on are returned: remove one of them"
        )
    is_compact = getattr(request.response_format, "disable_any_whitespace", False)
    if not isinstance(is_compact, bool):
        raise VLLMValidationError("disable_any_whitespace must be true or false")
    if is_compact:
        request.vllm_xargs = {WHITESPACE: COMPACT, **(request.vllm_xargs or {})}


def _check(rule: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        rule(*args, **kwargs)
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None


def _check_length(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise VLLMValidationError(
            f"{name} is too long: {len(text):,} characters, and the limit is {most:,}"
        )


def _check_sendable(name: str, value: Any) -> None:
    try:
        msgspec.msgpack.encode(value)
    except TypeError:  # an object of vLLM's own, which it knows how to send
        pass
    except (ValueError, OverflowError, RecursionError) as error:
        raise VLLMValidationError(
            f"{name} cannot be used ({type(error).__name__}): text must be valid Unicode, "
            "integers have at most 64 bits, and lists must not be nested deeply"
        ) from None
