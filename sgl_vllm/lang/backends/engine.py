"""The backend for a vLLM engine that this process starts, without a server.

Owns the engine's lifetime (it starts on first use and ends with `close`), runs requests on it, and
translates them and their outputs into vLLM's objects and back. vLLM is imported when the engine
starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast  # Any: options of vLLM's

from sgl_vllm.lang.backends.base import Json, program_id
from sgl_vllm.lang.backends.on_vllm import (
    ONE_TOKEN,
    Once,
    OnVLLM,
    generation_body,
    missed_by_cause,
    with_report,
)
from sgl_vllm.lang.backends.requests import (
    GenAnswer,
    Generated,
    GenRequest,
    ServerInfo,
    TokenLogprob,
    Watch,
)
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.prompts import ChatPrompt, Prompt, TextPrompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.request_keys import SEGMENTS
from sgl_vllm.protocol.scoring import all_answers, in_requests, scored_rows
from sgl_vllm.protocol.segments import intervals_of, marks_in, with_length

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig
    from vllm.inputs import EngineInput
    from vllm.logprobs import LogprobsOnePosition
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.renderers.params import ChatParams
    from vllm.v1.engine.async_llm import AsyncLLM

_request_numbers = itertools.count(1)

_SHUTDOWN_TIMEOUT_S = 10.0
"""How long the engine may take to shut down before it is killed."""

_PLUGIN = "sgl_vllm"
"""The plugin's name, and its key in vLLM's `additional_config`."""


class Engine(OnVLLM):
    """A vLLM engine that runs `model`; `engine_args` are vLLM's own (``dtype=``, ...).

    The engine runs in a separate process. It starts on first use, or at the beginning of a ``with``
    statement, and ends with `close` or at the end of the statement. If it is used after that, it
    starts again. As with vLLM, a script must start it under ``if __name__ == "__main__":``.

    `plugin` activates the sgl_vllm plugin in this engine: True, or a mapping of its options.
    `timeout_s` limits every call, but not the start, which has vLLM's own limit.
    `chat_template_kwargs` are what the model's chat template takes, as for `VLLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        plugin: bool | Mapping[str, Any] = False,
        timeout_s: float = 600.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        self.model = model
        self.timeout_s = timeout_s
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._plugin = {} if plugin is True else dict(plugin) if plugin is not False else None
        self._engine_args = engine_args
        self._running: Once[AsyncLLM] = Once(self._start)

    @property
    def name(self) -> str:
        return f"the engine of {self.model}"

    # --- lifetime --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine now, and wait until it is ready."""
        background_loop().run_blocking(self._engine)

    def close(self) -> None:
        """Shut the engine down, and wait until its process has ended."""
        background_loop().run_blocking(self.aclose)

    async def aclose(self) -> None:
        await asyncio.wrap_future(background_loop().start(self._end()))

    async def _end(self) -> None:
        running, self._running = self._running, Once(self._start)
        if running.was_asked:  # it may still be starting
            with contextlib.suppress(BackendError):
                engine = await running.answer()
                await asyncio.to_thread(engine.shutdown, _SHUTDOWN_TIMEOUT_S)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _engine(self) -> AsyncLLM:
        return await self._running.answer()

    async def _start(self) -> AsyncLLM:
        # In a thread, because it takes seconds. The engine binds to this loop with its first
        # request.
        return await asyncio.to_thread(self._new_engine)

    def _new_engine(self) -> AsyncLLM:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise BackendError(
                f"{self.name} needs vLLM in this environment ({error}): see `sgl-vllm doctor`"
            ) from error
        arguments = suggests(AsyncEngineArgs)
        args = {"disable_log_stats": True, "enable_log_requests": False, **self._engine_args}
        try:
            if self._plugin is None:
                return AsyncLLM.from_engine_args(arguments(model=self.model, **args))
            others = args.pop("additional_config", None) or {}
            args["additional_config"] = {**others, _PLUGIN: self._plugin}
            with _plugin_allowed():
                return AsyncLLM.from_engine_args(arguments(model=self.model, **args))
        except Exception as error:
            raise BackendError(f"{self.name} did not start: {error}") from error

    # --- the interface of a backend --------------------------------------------------------------

    async def generate_texts(self, request: GenRequest) -> GenAnswer:
        engine = await self._engine()
        rendered = await self._render(engine, request.prompt)
        body = generation_body(request, chat=False)
        _place_segments(body.get("vllm_xargs", {}), request.prompt, rendered.get("prompt"))
        try:
            num_prompt_tokens = len(rendered["prompt_token_ids"])
            params = sampling_params(engine.model_config, body, num_prompt_tokens)
        except Exception as error:
            self._raise(error, refused=True)
        prompt_from = request.sampling.prompt_logprobs_from
        output = await self._run(engine, rendered, params, request.watch)
        texts = [generated(one) for one in sorted(output.outputs, key=lambda o: o.index)]
        usage = with_report(texts, usage_of([output]), output.kv_transfer_params)
        prompt_logprobs = () if prompt_from is None else output.prompt_logprobs or ()
        tokens = tuple(token_logprob(row) for row in list(prompt_logprobs)[prompt_from:] if row)
        return GenAnswer(tuple(texts), usage, tokens, output.request_id)

    async def warm(self, prompt: Prompt) -> Usage:
        return (await self.compute([prompt]))[1]

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        if not await self.has_plugin():
            return {}
        from sgl_vllm.routes.engines import ask_engines

        asked = {"request_id": request_id, "cache_salt": None}
        for explanations in await ask_engines(await self._engine(), list[Json], "why", asked):
            if explanations:
                return missed_by_cause(explanations[0])
        return {}

    async def aflush_cache(self) -> None:
        if not await (await self._engine()).reset_prefix_cache():
            raise BackendError(
                f"{self.name} did not empty its cache, because requests are using it: try again "
                f"when none is running"
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

    async def compute(
        self,
        prompts: Sequence[Prompt] | Sequence[list[int]],
        endings: Sequence[list[int]] = (),
        asked: Json | None = None,
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """Tokens count as one call, prompts as one each."""
        engine = await self._engine()
        params = one_token(prompt_logprobs=0 if endings else None, extra_args=asked)
        rendered = [await self._render(engine, one) for one in prompts]
        outputs = await all_answers([self._run(engine, one, params) for one in rendered])
        usage = usage_of(outputs)
        if not isinstance(prompts[0], list):
            usage = replace(usage, calls=len(outputs))
        pairs = zip(outputs, endings, strict=True) if endings else ()
        return [logprobs_of(output, ending) for output, ending in pairs], usage

    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], list[Usage]] | None:
        engine = await self._engine()
        if engine.model_config.logprobs_mode != "raw_logprobs":
            return None
        some_of_them = in_requests(tokens)
        rendered = [await self._render(engine, ids) for _ in some_of_them]
        outputs = await all_answers(
            [
                self._run(engine, one, one_token(logprob_token_ids=some))
                for one, some in zip(rendered, some_of_them, strict=True)
            ]
        )
        rows = {
            token: row.logprob
            for output in outputs
            for token, row in (output.outputs[0].logprobs or [])[0].items()
        }
        return [rows[token] for token in tokens], [usage_of([output]) for output in outputs]

    # --- requests --------------------------------------------------------------------------------

    async def _render(self, engine: AsyncLLM, prompt: Prompt | list[int]) -> Json:
        """A prompt, or its tokens, as vLLM's server renders it, with the model's own chat template:
        one of vLLM's inputs, with ``prompt_token_ids``."""
        try:
            if isinstance(prompt, ChatPrompt):
                messages = [message.as_dict() for message in prompt.messages]
                params = chat_params(
                    engine, prompt, self.media_io_kwargs(prompt), self._chat_template_kwargs
                )
                _, (rendered,) = await engine.renderer.render_chat_async([messages], params)
                return rendered
            if prompt == TextPrompt(""):
                prompt = await self.ids_of_empty_prompt()
            given: Json = (
                {"prompt": prompt.text}
                if isinstance(prompt, TextPrompt)
                else {"prompt_token_ids": prompt}
            )
            (rendered,) = await engine.renderer.render_cmpl_async([given])
            return rendered
        except Exception as error:
            self._raise(error, refused=True)

    async def _run(
        self, engine: AsyncLLM, rendered: Json, params: SamplingParams, watch: Watch | None = None
    ) -> RequestOutput:
        """The last output of one request. With `watch`, its only text is passed there as it
        arrives. Canceling this aborts the request, and so does `watch` if it returns True."""
        from vllm.sampling_params import RequestOutputKind

        if watch is not None:
            params.output_kind = RequestOutputKind.CUMULATIVE
        request_id = f"{program_id.get() or 'sgl'}-{next(_request_numbers)}"
        generating = engine.generate(cast("EngineInput", rendered), params, request_id)
        num_shown = 0
        try:
            async with asyncio.timeout(self.timeout_s), contextlib.aclosing(generating) as outputs:
                async for output in outputs:
                    raise_if_failed(output, self.name)
                    text = output.outputs[0]
                    piece, num_shown = text.text[num_shown:], len(text.text)
                    if watch is not None and piece and watch(piece, len(text.token_ids)):
                        text.finish_reason = text.finish_reason or "length"
                        break
        except Exception as error:
            self._raise(error)
        return output

    def _raise(self, error: Exception, *, refused: bool = False) -> NoReturn:
        """Raise a failure as a BackendError. If the request was `refused`, the status is 400, as a
        server's would be."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        status = None
        if isinstance(error, BackendError):
            raise error
        if isinstance(error, TimeoutError):
            problem = f"did not answer within {self.timeout_s:g} s: raise timeout_s"
        elif isinstance(error, EngineDeadError):
            problem = "has died; see its log. After close() it starts again when it is used"
        elif refused or isinstance(error, (VLLMClientError, ValueError)):
            problem, status = f"refused the request: {error}", 400
        else:
            problem = f"failed: {error.__cause__ or error!r}"
        raise BackendError(f"{self.name} {problem}", status=status) from error


@contextlib.contextmanager
def _plugin_allowed() -> Iterator[None]:
    """Load the plugin in this process, and in those started inside the ``with`` block."""
    from importlib.metadata import entry_points  # takes milliseconds, and few programs need it

    found = list(entry_points(group="vllm.general_plugins", name=_PLUGIN))
    if not found:
        raise BackendError(
            "the sgl_vllm plugin is not installed in this environment: pip install sgl-vllm"
        )
    found[0].load()()
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or _PLUGIN in named.split(","):  # unset: vLLM loads every plugin
        yield
        return
    os.environ["VLLM_PLUGINS"] = f"{named},{_PLUGIN}"
    try:
        yield
    finally:
        os.environ["VLLM_PLUGINS"] = named


def _place_segments(asked: Json, prompt: Prompt, rendered: str | None) -> None:
    """Mark the segments of a prompt in what is `asked` of the plugin, where a server has them."""
    if SEGMENTS in asked:
        if isinstance(prompt, ChatPrompt):
            contents = [message.content for message in prompt.messages]
            asked[SEGMENTS] = marks_in(rendered, contents, intervals_of(asked[SEGMENTS]))
        asked.update(with_length(asked, rendered))


# --- requests as vLLM has them --------------------------------------------------------------------


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


# --- errors --------------------------------------------------------------------------------------


def raise_if_failed(output: RequestOutput, name: str) -> None:
    """Raise BackendError if the engine called `name` has failed a request. Where its format is the
    reason, the engine says so in `stop_reason`."""
    for one in output.outputs:
        if one.finish_reason == "error" and isinstance(one.stop_reason, str):
            raise BackendError(f"{name} refused the request: {one.stop_reason}", status=400)
        if one.finish_reason == "error":
            raise BackendError(f"{name} failed: its log has the error")
