"""The backend for a vLLM engine of this process's own, without a server.

Owns the engine's life (its process starts with the first use and ends with `close`) and the
translation of requests into vLLM's. Imports vLLM only when the engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from sgl_vllm.lang.backends.base import (
    ChatPrompt,
    GenAnswer,
    Generated,
    GenRequest,
    Prompt,
    ServerInfo,
    TextPrompt,
    TokenLogprob,
    Usage,
    Watch,
    program_id,
)
from sgl_vllm.lang.backends.on_vllm import OnVLLM, with_report
from sgl_vllm.lang.backends.service import Once
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.protocol.request_keys import REPORT, SCORE_FROM
from sgl_vllm.protocol.scoring import all_answers, scored_rows

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_request_numbers = itertools.count(1)

_END_TIMEOUT_S = 10.0
"""So long the engine may take to end by itself before it is killed."""

_PLUGIN = "sgl_vllm"
"""The plugin's name, and its place in vLLM's `additional_config`."""


class Engine(OnVLLM):
    """A vLLM engine that runs `model`; `engine_args` are vLLM's own (``dtype=``, ...).

    The engine is a process of its own, started at the first use (in a ``with`` statement: at its
    beginning) and ended by `close`, or at the end of the statement; it starts anew when used after
    that. In a script, what starts it belongs under ``if __name__ == "__main__":``, as with vLLM.

    `plugin` switches the sgl_vllm plugin on in this engine: True, or a mapping of its options.
    `timeout_s` bounds every call; the engine's start has vLLM's own limit.
    """

    def __init__(
        self,
        model: str,
        *,
        plugin: bool | Mapping[str, Any] = False,
        timeout_s: float = 600.0,
        **engine_args: Any,
    ) -> None:
        self.model = model
        self.timeout_s = timeout_s
        self._plugin = {} if plugin is True else dict(plugin) if plugin is not False else None
        self._engine_args = engine_args
        self._running: Once[AsyncLLM] = Once(self._start)

    @property
    def name(self) -> str:
        return f"the engine of {self.model}"

    # --- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine now, and wait until it runs."""
        _wait_for(background_loop().start(self._engine()))

    def close(self) -> None:
        """End the engine's process, and wait for that."""
        _wait_for(background_loop().start(self.aclose()))

    async def aclose(self) -> None:
        await asyncio.wrap_future(background_loop().start(self._end()))

    async def _end(self) -> None:
        running, self._running = self._running, Once(self._start)
        if running.was_asked:  # it may be starting still
            with contextlib.suppress(BackendError):
                await asyncio.to_thread(_shut_down, await running.answer())

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _engine(self) -> AsyncLLM:
        return await self._running.answer()

    async def _start(self) -> AsyncLLM:
        # In a thread, as it takes long; the engine binds itself to this loop at its first request.
        return await asyncio.to_thread(self._new_engine)

    def _new_engine(self) -> AsyncLLM:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise BackendError(
                f"{self.name} needs vLLM in this environment ({error}): see `sgl-vllm doctor`"
            ) from error
        args = {"disable_log_stats": True, "enable_log_requests": False, **self._engine_args}
        try:
            if self._plugin is None:
                return AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.model, **args))
            others = args.pop("additional_config", None) or {}
            args["additional_config"] = {**others, _PLUGIN: self._plugin}
            with _plugin_allowed():
                return AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.model, **args))
        except Exception as error:
            raise BackendError(f"{self.name} did not start: {error}") from error

    # --- what the interpreter asks for -----------------------------------------------------------

    async def generate(self, request: GenRequest) -> GenAnswer:
        engine = await self._engine()
        sampling = request.sampling
        rendered = await self._render(engine, request.prompt)
        params = self._params(engine, sampling, rendered)
        if (constraint := request.constraint) is not None:
            from vllm.sampling_params import StructuredOutputsParams

            params.structured_outputs = StructuredOutputsParams(
                **{constraint.kind.vllm_key: constraint.text}
            )
            if params.n == 1:  # vLLM would tell of one text only
                params.extra_args = {REPORT: 1}
        prompt_from = sampling.prompt_logprobs_from
        if prompt_from is not None:
            params.prompt_logprobs = sampling.top_logprobs_num
        if request.watch is None:
            output = await self._run(engine, rendered, params)
            texts = [_generated(one) for one in sorted(output.outputs, key=lambda o: o.index)]
            usage = _usage([output])
        else:
            output, text, usage = await self._run_watched(engine, rendered, params, request.watch)
            texts = [text]
        usage = with_report(texts, usage, output.kv_transfer_params)
        prompt_logprobs = () if prompt_from is None else output.prompt_logprobs or ()
        tokens = tuple(_token_logprob(row) for row in list(prompt_logprobs)[prompt_from:] if row)
        return GenAnswer(tuple(texts), usage, tokens)

    async def warm(self, prompt: Prompt) -> Usage:
        engine = await self._engine()
        output = await self._run(engine, await self._render(engine, prompt), _least())
        return _usage([output])

    async def flush_cache(self) -> None:
        if not await (await self._engine()).reset_prefix_cache():
            raise BackendError(
                f"{self.name} did not empty its cache: it is in use, try again when no request is "
                f"running"
            )

    async def server_info(self) -> ServerInfo:
        from vllm import __version__

        engine = await self._engine()
        plugin = await self.has_plugin()
        stats = None
        if plugin:
            from sgl_vllm.routes.engines import engine_stats

            stats = (await engine_stats(engine)).to_json()
        return ServerInfo(
            url="in process",
            model=self.model,
            max_model_len=engine.model_config.max_model_len,
            vllm_version=__version__,
            plugin=plugin,
            stats=stats,
        )

    async def has_plugin(self) -> bool:
        engine = await self._engine()
        return _PLUGIN in (engine.vllm_config.additional_config or {})

    # --- tokens and scores -----------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt) -> list[int]:
        rendered = await self._render(await self._engine(), prompt)
        return list(rendered["prompt_token_ids"])

    async def begin_ids(self) -> list[int]:
        engine = await self._engine()
        renderer = engine.renderer
        tokens = await renderer.tokenize_prompt_async(
            {"prompt": ""}, renderer.default_cmpl_tok_params
        )
        return list(tokens["prompt_token_ids"])

    async def warm_ids(self, ids: list[int]) -> Usage:
        return _usage([await self._run_ids(await self._engine(), ids, _least())])

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        engine = await self._engine()
        params = _least(prompt_logprobs=0, extra_args={SCORE_FROM: start})
        outputs = await all_answers([self._run_ids(engine, ids, params) for ids in sequences])
        rows = [
            tuple(
                row[token].logprob
                for row, token in scored_rows(output.prompt_logprobs or [], ids, start)
                if row is not None
            )
            for output, ids in zip(outputs, sequences, strict=True)
        ]
        return rows, _usage(outputs)

    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], list[Usage]] | None:
        engine = await self._engine()
        if engine.model_config.logprobs_mode != "raw_logprobs":
            return None
        only = [_least(logprobs=0, allowed_token_ids=[token]) for token in tokens]
        outputs = await all_answers([self._run_ids(engine, ids, params) for params in only])
        logprobs = [
            (output.outputs[0].logprobs or [])[0][token].logprob
            for output, token in zip(outputs, tokens, strict=True)
        ]
        return logprobs, [_usage([output]) for output in outputs]

    async def _run_ids(
        self, engine: AsyncLLM, ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        return await self._run(engine, await self._ids(engine, ids), params)

    # --- requests --------------------------------------------------------------------------------

    async def _render(self, engine: AsyncLLM, prompt: Prompt) -> Any:
        """The prompt as the engine takes it, with its ``prompt_token_ids``: as vLLM's server
        renders it, by the model's own chat template."""
        renderer = engine.renderer
        try:
            if isinstance(prompt, ChatPrompt):
                messages = [message.as_dict() for message in prompt.messages]
                _, (rendered,) = await renderer.render_chat_async(
                    [messages], self._chat_params(engine, prompt)
                )
            else:
                rendered = await self._render_text(engine, prompt)
        except Exception as error:
            self._raise_as_backend_error(error, refused=True)
        return rendered

    async def _render_text(self, engine: AsyncLLM, prompt: TextPrompt) -> Any:
        if prompt == TextPrompt(""):
            return await self._ids(engine, await self.ids_of_empty_prompt())
        (rendered,) = await engine.renderer.render_cmpl_async([{"prompt": prompt.text}])
        return rendered

    async def _ids(self, engine: AsyncLLM, ids: list[int]) -> Any:
        """Tokens as the engine takes them."""
        (rendered,) = await engine.renderer.render_cmpl_async([{"prompt_token_ids": ids}])
        return rendered

    def _chat_params(self, engine: AsyncLLM, prompt: ChatPrompt) -> Any:
        from vllm.renderers.params import ChatParams
        from vllm.utils.mistral import is_mistral_tokenizer

        multimodal = engine.model_config.multimodal_config
        return ChatParams(
            chat_template_kwargs={
                "add_generation_prompt": prompt.ending == "generate",
                "continue_final_message": prompt.ending == "continue",
                "tokenize": is_mistral_tokenizer(engine.renderer.tokenizer),
            },
            media_io_kwargs=self.media_io_kwargs(prompt) or None,
        ).with_defaults(default_media_io_kwargs=multimodal.media_io_kwargs if multimodal else None)

    def _params(self, engine: AsyncLLM, sampling: Sampling, rendered: Any) -> SamplingParams:
        """Sampling options in vLLM's words, as its server would have them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = engine.model_config
        room = config.max_model_len - len(rendered["prompt_token_ids"])
        of_model = config.get_diff_sampling_param()
        stop, max_tokens = sampling.stop, sampling.max_new_tokens
        try:
            return SamplingParams(
                n=sampling.n or 1,
                max_tokens=room if max_tokens is None else min(max_tokens, room),
                min_tokens=sampling.min_new_tokens or 0,
                stop=list(stop) if isinstance(stop, tuple) else stop,
                stop_token_ids=list(sampling.stop_token_ids or ()),
                temperature=1.0 if sampling.temperature is None else sampling.temperature,
                top_p=1.0 if sampling.top_p is None else sampling.top_p,
                top_k=-1 if sampling.top_k is None else sampling.top_k,
                min_p=sampling.min_p or 0.0,
                frequency_penalty=sampling.frequency_penalty or 0.0,
                presence_penalty=sampling.presence_penalty or 0.0,
                repetition_penalty=of_model.get("repetition_penalty", 1.0),
                ignore_eos=bool(sampling.ignore_eos),
                logprobs=sampling.top_logprobs_num if sampling.return_logprob else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except Exception as error:
            self._raise_as_backend_error(error, refused=True)

    async def _run(self, engine: AsyncLLM, rendered: Any, params: SamplingParams) -> RequestOutput:
        """One request's last output; the request is aborted if this is cancelled."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                contextlib.aclosing(self._outputs(engine, rendered, params)) as outputs,
            ):
                return [output async for output in outputs][-1]
        except Exception as error:
            self._raise_as_backend_error(error)

    async def _run_watched(
        self, engine: AsyncLLM, rendered: Any, params: SamplingParams, watch: Watch
    ) -> tuple[RequestOutput, Generated, Usage]:
        """One text, shown to `watch` as it comes; the request is aborted if that is enough."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.DELTA
        text, num_tokens, logprobs = "", 0, list[TokenLogprob]()
        reason: str | None = None
        first = last = None
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                contextlib.aclosing(self._outputs(engine, rendered, params)) as outputs,
            ):
                async for last in outputs:
                    first = first or last
                    one = last.outputs[0]
                    text += one.text
                    num_tokens += len(one.token_ids)
                    logprobs += map(_token_logprob, one.logprobs or ())
                    reason = one.finish_reason
                    if one.text and watch(one.text, num_tokens):
                        reason = reason or "length"
                        break
        except Exception as error:
            self._raise_as_backend_error(error)
        assert first is not None and last is not None and reason is not None
        if last.prompt_logprobs is None:  # told once, with the first output
            last.prompt_logprobs = first.prompt_logprobs
        usage = replace(_usage([first]), completion_tokens=num_tokens)
        return last, Generated(text, reason, tuple(logprobs)), usage

    def _outputs(
        self, engine: AsyncLLM, rendered: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        request_id = f"{program_id.get() or 'sgl'}-{next(_request_numbers)}"
        return engine.generate(rendered, params, request_id)

    def _raise_as_backend_error(self, error: Exception, *, refused: bool = False) -> NoReturn:
        """A failure as a BackendError; `refused` is one of the request, as a server's 400."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, BackendError):
            raise error
        if isinstance(error, TimeoutError):
            raise BackendError(
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s"
            ) from error
        if isinstance(error, EngineDeadError):
            raise BackendError(
                f"{self.name} has died; its log says why. close() it, and it starts anew"
            ) from error
        if refused or isinstance(error, (VLLMClientError, ValueError)):
            raise BackendError(f"{self.name} refused the request: {error}", status=400) from error
        raise BackendError(f"{self.name} failed: {error.__cause__ or error!r}") from error


def _shut_down(engine: AsyncLLM) -> None:
    engine.shutdown(_END_TIMEOUT_S)


def _wait_for(future: Future[Any]) -> None:
    background_loop().wait_for(future)


@contextlib.contextmanager
def _plugin_allowed() -> Iterator[None]:
    """The plugin is loaded in this process, and in those that are started in the context."""
    from sgl_vllm.plugin import register

    register()
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or _PLUGIN in named.split(","):  # unset: every plugin is loaded
        yield
        return
    os.environ["VLLM_PLUGINS"] = f"{named},{_PLUGIN}"
    try:
        yield
    finally:
        os.environ["VLLM_PLUGINS"] = named


def _generated(output: Any) -> Generated:
    logprobs = tuple(_token_logprob(row) for row in output.logprobs or ())
    return Generated(output.text, str(output.finish_reason), logprobs)


def _token_logprob(row: Mapping[int, Any]) -> TokenLogprob:
    """A position of vLLM's: the token itself comes first, then the likeliest ones."""
    chosen = next(iter(row.values()))
    top = tuple((one.decoded_token or "", one.logprob) for one in row.values())
    return TokenLogprob(chosen.decoded_token or "", chosen.logprob, top)


def _least(**options: Any) -> SamplingParams:
    """The least that vLLM generates: for requests that are about their prompt."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, **options)


def _usage(outputs: list[RequestOutput]) -> Usage:
    """What requests have cost, as one call."""
    return Usage(
        prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in outputs),
        cached_prompt_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        completion_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
        calls=1,
    )
