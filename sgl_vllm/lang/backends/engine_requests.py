"""Requests and outputs of the language as vLLM's own objects, for the engine in this process.

Owns the translation in both directions: sampling and chat parameters, prompts, texts,
log-probabilities and usage. Starts nothing. vLLM is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn  # Any: options of vLLM's

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.on_vllm import ONE_TOKEN
from sgl_vllm.lang.backends.requests import Generated, TokenLogprob
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.prompts import ChatPrompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import scored_rows

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig
    from vllm.logprobs import LogprobsOnePosition
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.renderers.params import ChatParams
    from vllm.v1.engine.async_llm import AsyncLLM


def sampling_params(config: ModelConfig, body: Json, num_prompt_tokens: int) -> SamplingParams:
    """The options of a completion as vLLM's server would pass them to the engine. ValueError (or
    one of vLLM's errors) for options that vLLM rejects."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    room = config.max_model_len - num_prompt_tokens
    request = CompletionRequest.model_validate({"prompt": "rendered elsewhere", **body})
    return request.to_sampling_params(
        max_tokens=min(body.get("max_tokens", room), room),
        default_sampling_params=config.get_diff_sampling_param(),
    )


def one_token(**options: Any) -> SamplingParams:  # any of vLLM's options
    """The fewest tokens that vLLM generates: for requests that are about their prompt."""
    from vllm import SamplingParams

    return SamplingParams(**ONE_TOKEN, **options)


def chat_params(
    engine: AsyncLLM, prompt: ChatPrompt, media_io_kwargs: Json, template_kwargs: Json
) -> ChatParams:
    """How to render a chat, with the model's own template and what that takes."""
    from vllm.renderers.params import ChatParams
    from vllm.utils.mistral import is_mistral_tokenizer

    multimodal = engine.model_config.multimodal_config
    return ChatParams(
        chat_template_kwargs={
            **template_kwargs,
            "add_generation_prompt": prompt.ending == "generate",
            "continue_final_message": prompt.ending == "continue",
            "tokenize": is_mistral_tokenizer(engine.renderer.tokenizer),
        },
        media_io_kwargs=media_io_kwargs or None,
    ).with_defaults(default_media_io_kwargs=multimodal.media_io_kwargs if multimodal else None)


# --- outputs -------------------------------------------------------------------------------------


def generated(output: CompletionOutput) -> Generated:
    logprobs = tuple(token_logprob(row) for row in output.logprobs or ())
    return Generated(output.text, str(output.finish_reason), logprobs)


def token_logprob(row: LogprobsOnePosition) -> TokenLogprob:
    """One position: in vLLM's row, the token itself comes first, then the most likely ones."""
    chosen = next(iter(row.values()))
    top = tuple((one.decoded_token or "", one.logprob) for one in row.values())
    return TokenLogprob(chosen.decoded_token or "", chosen.logprob, top)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """The cost of `outputs`, as one call."""
    return Usage(
        prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in outputs),
        cached_prompt_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        completion_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
        calls=1,
    )


def logprobs_of(output: RequestOutput, ending: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of the last tokens of a prompt, which are `ending`."""
    rows = scored_rows(output.prompt_logprobs or [], ending)
    return tuple(row[token].logprob for row, token in rows if row is not None)


class StreamedText:
    """One text that arrives in several outputs."""

    def __init__(self) -> None:
        self.first: RequestOutput | None = None
        self.last: RequestOutput | None = None
        self.text = ""
        self.num_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def add(self, output: RequestOutput) -> str:
        """Take one output; returns its part of the text."""
        self.first = self.first or output
        self.last = output
        one = output.outputs[0]
        self.text += one.text
        self.num_tokens += len(one.token_ids)
        self.logprobs += map(token_logprob, one.logprobs or ())
        self.finish_reason = one.finish_reason
        return one.text

    def generated(self) -> Generated:
        assert self.finish_reason is not None
        return Generated(self.text, self.finish_reason, tuple(self.logprobs))


# --- errors --------------------------------------------------------------------------------------


def raise_if_failed(output: RequestOutput, name: str) -> None:
    """Raise BackendError if the engine called `name` has failed a request. Where its format is the
    reason, the engine says so in `stop_reason`."""
    for one in output.outputs:
        if one.finish_reason == "error" and isinstance(one.stop_reason, str):
            raise BackendError(f"{name} refused the request: {one.stop_reason}", status=400)
        if one.finish_reason == "error":
            raise BackendError(f"{name} failed: its log has the error")


def raise_as_backend_error(
    error: Exception, name: str, timeout_s: float, *, refused: bool = False
) -> NoReturn:
    """Raise a failure of the engine called `name` as a BackendError. If the request was `refused`,
    the status is 400, as a server's would be."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, BackendError):
        raise error
    if isinstance(error, TimeoutError):
        raise BackendError(
            f"{name} did not answer within {timeout_s:g} s: raise timeout_s"
        ) from error
    if isinstance(error, EngineDeadError):
        raise BackendError(
            f"{name} has died; see its log. After close() it starts again when it is used"
        ) from error
    if refused or isinstance(error, (VLLMClientError, ValueError)):
        raise BackendError(f"{name} refused the request: {error}", status=400) from error
    raise BackendError(f"{name} failed: {error.__cause__ or error!r}") from error
