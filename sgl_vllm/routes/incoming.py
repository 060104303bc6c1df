"""What happens to each request on its way from vLLM's HTTP routes to the engines.

Owns seven rules. Invalid requests get a 400 (`admission.py`). So do formats that an engine refuses.
Standard hints are read (`standard_hints.py`). The tenant decides the `cache_salt` (`tenants.py`).
Segments that a chat marks are moved to their place in its prompt. The reported number of cached
tokens is rounded where it could reveal another client's prompt. Forced tokens are counted in
`usage` (`forced_usage.py`).

The rounding: the tree finds prefixes to the token. A client that learns the exact length could
guess another client's prompt token by token. Stock vLLM finds whole blocks, so a guess has to get a
whole block right. Without a `cache_salt`, a request gets a number of whole blocks. With one it
shares tokens only with requests of the same salt, and gets the exact number. So do all requests if
the server shows prompts to all clients anyway. vLLM's metrics stay exact.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any  # Any: arguments of vLLM's
from weakref import WeakSet

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM, InputStreamError
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from sgl_vllm.protocol.request_keys import SEGMENTS
from sgl_vllm.protocol.segments import intervals_of, marks_in, with_length
from sgl_vllm.routes import forced_usage
from sgl_vllm.routes.admission import check_body, check_params, check_request
from sgl_vllm.routes.standard_hints import read_hints
from sgl_vllm.routes.tenants import TenantSource
from sgl_vllm.vllm_api.patching import wrap


class IncomingRequests:
    """The rules for the requests of one live `AsyncLLM`.

    Args:
        tenants: what names a request's tenant.
        block_size: returns the tokens per KV block of the engines.
        is_exact: whether requests without a salt get the exact number too.
    """

    def __init__(
        self, tenants: TenantSource, block_size: Callable[[], int], *, is_exact: bool = False
    ) -> None:
        self._tenants = tenants
        self._block_size = block_size
        self._is_exact = is_exact
        self._with_salt: WeakSet[RequestState] = WeakSet()

    def attach(self, client: AsyncLLM) -> None:
        """Apply the rules to every request from now on."""

        # Any: arguments of vLLM's that pass through.
        @wrap(client, "add_request")
        async def add_checked(
            original: Callable[..., Awaitable[Any]],
            request_id: str,
            prompt: Any,
            params: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            check_params(params)
            return await original(request_id, prompt, params, *args, **kwargs)

        self._attach(client.output_processor)

    def _attach(self, processor: OutputProcessor) -> None:
        """The output processor sees each request as it will be sent."""

        @wrap(processor, "add_request")
        def add_request(
            original: Callable[..., None],
            request: EngineCoreRequest,
            prompt: str | None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            check_request(request)
            params = request.sampling_params
            if params is not None and params.extra_args and SEGMENTS in params.extra_args:
                params.extra_args = with_length(params.extra_args, prompt)
            request.cache_salt = self._tenants.salt(request.cache_salt)
            forced_usage.ask(params)
            original(request, prompt, *args, **kwargs)
            state = processor.request_states[request.request_id]
            forced_usage.follow(state)
            if request.cache_salt and not self._is_exact:
                self._with_salt.add(state)

        @wrap(processor, "_update_stats_from_output")
        def update_stats(
            original: Callable[..., None],
            req_state: RequestState,
            engine_core_output: EngineCoreOutput,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            _refuse(req_state, engine_core_output)
            forced_usage.take(req_state, engine_core_output)
            original(req_state, engine_core_output, *args, **kwargs)  # vLLM's metrics: exact
            is_told_exactly = self._is_exact or req_state in self._with_salt
            if engine_core_output.prefill_stats is not None and not is_told_exactly:
                self._round(engine_core_output)

    def cached_block_size(self) -> int:
        """The current client's requests without a `cache_salt` of their own are told of cached
        tokens in whole blocks of this size; 1 if exactly."""
        is_exact = self._is_exact or self._tenants.salt(None) is not None
        return 1 if is_exact else self._block_size()

    def _round(self, output: EngineCoreOutput) -> None:
        """Count the last, partial block of a hit as computed, in what the client sees."""
        exact = output.prefill_stats
        assert exact is not None
        num_inside = exact.num_cached_tokens % self._block_size()
        if not num_inside:
            return
        told = copy.copy(exact)
        told.num_cached_tokens -= num_inside
        if hasattr(told, "num_cache_creation_tokens"):
            told.num_cache_creation_tokens += num_inside
        output.prefill_stats = told


def _refuse(state: RequestState, output: EngineCoreOutput) -> None:
    """Fail the client's request with status 400 if the engine says why it refuses its format
    (`scheduler/refusals.py`). vLLM answers every other error with a 500 without a reason.

    `InputStreamError` is vLLM's way to fail one request with an error of the caller's: it also
    aborts the request's other answers (`n`). The output that vLLM queues next does not replace it.
    """
    if output.finish_reason != FinishReason.ERROR or state.queue is None:
        return
    if isinstance(reason := output.stop_reason, str):
        state.queue.put(InputStreamError(VLLMValidationError(reason)))


def read_bodies(renderer: OnlineRenderer, *, moves_segments: bool) -> None:
    """From now on, check the bodies of chats and completions and read their standard hints, before
    vLLM renders their prompts. Afterwards, before vLLM makes requests of them, move the segments
    that a chat marks to where they are in its prompt (`protocol/segments.py`)."""

    @wrap(renderer, "render_chat")
    @wrap(renderer, "render_completion")
    async def render(
        original: Callable[..., Awaitable[Any]],
        request: ChatCompletionRequest | CompletionRequest,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        check_body(request)
        read_hints(request, request)
        result = await original(request, *args, **kwargs)
        if moves_segments and isinstance(request, ChatCompletionRequest):
            _move_segments(request, result)
        return result


def _move_segments(request: ChatCompletionRequest, rendered: Any) -> None:
    extra = request.vllm_xargs
    if not extra or SEGMENTS not in extra or not isinstance(rendered, tuple):
        return
    try:
        intervals = intervals_of(extra[SEGMENTS])
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None
    contents = [
        message.get("content") if isinstance(message, dict) else None
        for message in request.messages
    ]
    _, (engine_input,) = rendered
    marks = marks_in(engine_input.get("prompt"), contents, intervals)
    request.vllm_xargs = {**extra, SEGMENTS: marks}
