"""The backend for a vLLM server, with or without the sgl_vllm plugin, over HTTP.

Owns vLLM's extensions of OpenAI's API, and the plugin's routes under /v1/sgl/. Text prompts go to
/v1/completions and chats to /v1/chat/completions, so that the chat template is always the
server's. Both kinds of server give the same answers; the plugin makes some of them cheaper.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any  # Any: what a chat template takes
from urllib.parse import urlencode

from sgl_vllm.lang.backends.base import Json, program_id
from sgl_vllm.lang.backends.batching import NOT_FORWARDED, Batcher
from sgl_vllm.lang.backends.openai_api import read_generated, read_usage, sampling_body
from sgl_vllm.lang.backends.openai_client import OpenAIBackend
from sgl_vllm.lang.backends.requests import (
    GenAnswer,
    GenRequest,
    ScoreAnswer,
    ServerInfo,
    SpokenRequest,
    Watch,
    no_hints,
)
from sgl_vllm.lang.backends.service import Connection, Once
from sgl_vllm.lang.backends.vllm_requests import (
    ONE_TOKEN,
    ScoringByPrompts,
    choices_of,
    generation_body,
    has_media,
    logprobs_of,
    missed_by_cause,
    prompt_body,
    prompt_rows,
    prompt_tokens,
    with_report,
)
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.prompts import ChatPrompt, Prompt, TextPrompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.hints import Hints, write_hints
from sgl_vllm.protocol.request_keys import AHEAD, FORCED, PROGRAM
from sgl_vllm.protocol.scoring import all_answers

_request_numbers = itertools.count(1)

_TRUST_MEDIA_OPTIONS = "--trust-request-mm-kwargs"
"""The flag that vLLM names where it refuses `media_io_kwargs`."""


class _KnownServer:
    """What is known of a server over one connection: questions that are asked once, when their
    answer is first needed, and the batcher."""

    def __init__(self, backend: VLLM, connection: Connection) -> None:
        self.connection = connection
        with connection.client() as client:
            self.batcher = Batcher(
                client, backend.post, timeout_s=backend.timeout_s, retry=backend.max_retries > 0
            )
        self.model = Once(backend._ask_model)
        self.plugin = Once(backend._ask_plugin)
        self.begin_ids = Once(lambda: backend.tokenize(TextPrompt("")))
        self.cached_block_size = 1  # `Usage.cached_block_size` without a salt


class VLLM(OpenAIBackend):
    """A vLLM server at `base_url` (with or without a final ``/v1``).

    Nothing is sent before the first program runs. `model` is by default the first one that the
    server lists. `timeout_s` limits every call, including its retries. A call that finds a refused
    or broken connection, or status 408, 409, 429 or 5xx, is retried up to `max_retries` times with
    exponential back-off. With `cache_salt`, all requests carry it, and share cached prefixes only
    with requests of the same salt. `chat_template_kwargs` are what the model's chat template takes,
    such as ``{"enable_thinking": False}``.
    """

    tells_tokens = True

    advice_on_no_answer = (
        "is the URL right, and is the server running? Start one with "
        "`vllm serve MODEL --plugin sgl_vllm`"
    )
    advice_on_nonsense = "is it a vLLM server?"
    advice_on_key = "pass the server's --api-key as VLLM(..., api_key=...)"

    @suggests
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("VLLM_API_KEY")
        super().__init__(f"{self.url}/v1", key, timeout_s, max_retries)
        self._model = model
        self._salt = {"cache_salt": cache_salt} if cache_salt else {}
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._known: _KnownServer | None = None

    def _server(self) -> _KnownServer:
        """What is known over the connection of this event loop."""
        connection = self.connect()
        if self._known is None or self._known.connection is not connection:
            self._known = _KnownServer(self, connection)
        return self._known

    @property
    def name(self) -> str:
        return f"the vLLM server at {self.url}"

    # --- the interface of a backend --------------------------------------------------------------

    async def generate(self, request: GenRequest) -> GenAnswer:
        """At temperature 0, all `n` texts are equal. vLLM then refuses more than one, so that one
        is generated."""
        sampling, copies = request.sampling, 1
        if sampling.temperature == 0 and sampling.n:
            copies, sampling = sampling.n, replace(sampling, n=1)
        prompt_from = sampling.prompt_logprobs_from
        body = generation_body(replace(request, sampling=sampling))
        # vLLM does not stream the log-probabilities of a prompt.
        watch = request.watch if prompt_from is None else None
        answer = await self._run_model(request.prompt, body, watch, request.hints)
        with self.reading():
            texts = [read_generated(choice) for choice in answer["choices"]]
            if len(texts) != (sampling.n or 1):
                raise ValueError(f"{len(texts)} texts instead of {sampling.n}")
            usage = with_report(texts, self._usage(answer), answer.get("kv_transfer_params"))
            prompt_logprobs = () if prompt_from is None else prompt_tokens(answer, prompt_from)
        if request.watch is not None and watch is None:
            request.watch(texts[0].text, usage.completion_tokens)
        return GenAnswer(tuple(texts) * copies, usage, prompt_logprobs, answer.get("id"))

    async def warm(self, prompt: Prompt) -> Usage:
        answer = await self._run_model(prompt, ONE_TOKEN)
        with self.reading():
            return self._usage(answer)

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        return (await self.compute([prompt], asked={AHEAD: 1}))[1]

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        """One request to a server with the plugin, several to a server without, and after media."""
        plugin = await self._may_use_plugin()
        if plugin and len(choices) <= scoring.MAX_CONTINUATIONS and not has_media(prompt):
            body = {
                **await self._common(),
                "prompt": self._prompt_body(prompt),
                "continuations": [self._prompt_body(prompt.extended(one)) for one in choices],
                "unconditional": unconditional,
                "warm": warm,
            }
            if program := program_id.get():
                body[PROGRAM] = program
            try:
                answer = await self.call(f"{self.url}/v1/sgl/score", body)
            except BackendError as error:
                if error.status not in NOT_FORWARDED:
                    raise
            else:
                with self.reading():
                    costs = (self._usage({"usage": usage}) for usage in answer["usages"])
                    return ScoreAnswer(choices_of(answer), sum(costs, Usage()))
        warm |= has_media(prompt)  # and learn how many tokens the model reads
        return await self.score_by_prompts(prompt, choices, unconditional, warm and plugin)

    async def score_by_prompts(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        """`score` over vLLM's own routes."""
        continued = [prompt.extended(choice) for choice in choices]
        (prefix_ids, *full_ids), costs = await self.tokenized([prompt, *continued])
        model: scoring.Model[Usage] = ScoringByPrompts(
            self.compute, self.begin_ids, prompt, continued, prefix_ids, full_ids
        )
        try:
            scored = await scoring.score(
                model, prefix_ids, full_ids, unconditional=unconditional, warm=warm
            )
        except scoring.NothingToScoreError as error:
            raise BackendError(str(error)) from None
        return ScoreAnswer(scored.choices, sum((*costs, *scored.costs), Usage()))

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        if not await self._may_use_plugin():
            return {}
        url = f"{self.url}/v1/sgl/why?{urlencode({'request': request_id})}"
        salt = self._salt.get("cache_salt")
        headers = {"X-Cache-Salt": salt} if salt else None
        try:
            answer = await self.call(url, headers=headers)
        except BackendError as error:
            if error.status == 404:
                return {}
            raise
        with self.reading():
            return missed_by_cause(answer["requests"][0])

    async def aflush_cache(self) -> None:
        if not await self.has_plugin():
            self.refuse("flush_cache", "start it with `vllm serve MODEL --plugin sgl_vllm`")
        await self.call(f"{self.url}/v1/sgl/flush_cache", {})

    async def server_info(self) -> ServerInfo:
        model = await self._server().model.answer()
        plugin = await self.has_plugin()
        stats = await self.call(f"{self.url}/v1/sgl/stats") if plugin else None
        version = await self.call(f"{self.url}/version")
        with self.reading():
            return ServerInfo(
                url=self.url,
                model=str(model["id"]),
                max_model_len=model.get("max_model_len"),
                vllm_version=version["version"],
                plugin=plugin,
                stats=stats,
            )

    async def has_plugin(self) -> bool:
        return await self._server().plugin.answer()

    async def _may_use_plugin(self) -> bool:
        """`has_plugin` for features that also work without it: an error status means no."""
        try:
            return await self.has_plugin()
        except BackendError as error:
            if error.status is None:
                raise
            return False

    # --- tokens and log-probabilities ------------------------------------------------------------

    async def begin_ids(self) -> list[int]:
        """What the tokenizer puts before any text: one token, or nothing."""
        return await self._server().begin_ids.answer()

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `generate` reads it."""
        body = {"model": await self.model_name(), **self._prompt_body(prompt)}
        answer = await self.call(f"{self.url}/tokenize", body)
        with self.reading():
            return [int(token) for token in answer["tokens"]]

    async def ids_of_empty_prompt(self) -> list[int]:
        """The tokens to send for a prompt without text, which vLLM rejects."""
        ids = await self.begin_ids()
        if not ids:
            raise BackendError(
                "the prompt is empty, and the model's tokenizer has no beginning-of-text token to "
                "start from: put some text before this"
            )
        return ids

    async def tokenized(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[Usage]]:
        """The tokens of each prompt, and the cost of obtaining them: if a gateway does not tokenize
        (Ray Serve LLM), they come with one generated token each."""
        try:
            return await all_answers([self.tokenize(prompt) for prompt in prompts]), []
        except BackendError as error:
            if error.status not in (400, 404, 405, 422):
                raise
        with_ids = {**ONE_TOKEN, "return_token_ids": True}
        answers = await all_answers([self._run_model(prompt, with_ids) for prompt in prompts])
        with self.reading():
            found = [  # a chat's are in the answer, a completion's in its choice
                answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
                for answer in answers
            ]
            ids = [[int(token) for token in tokens] for tokens in found]
            return ids, [self._usage(answer) for answer in answers]

    async def compute(
        self,
        prompts: Sequence[Prompt] | Sequence[list[int]],
        endings: Sequence[list[int]] = (),
        asked: Json | None = None,
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """Have the model read prompts, or their tokens, so that they are cached.

        Returns the cost, and the log-probabilities of the last tokens of each prompt, which are
        `endings`, if there are any. `asked` is for the plugin: with `SCORE_FROM`, what is before
        that token of a prompt may be read from the cache. Tokens are one request, prompts one each,
        not parts of a batch, so that each can be canceled.
        """
        body: Json = {**ONE_TOKEN, "vllm_xargs": asked} if asked else {**ONE_TOKEN}
        if endings:
            body["prompt_logprobs"] = 0
        texts = [one for one in prompts if not isinstance(one, list)]
        sent = [await self._with_prompt(one, body) for one in texts]
        if not texts:
            ids = prompts if endings else prompts[0]
            sent = [await self._with_program({"prompt": ids, **body})]
        answers = await all_answers([self.post(one) for one in sent])
        with self.reading():
            usage = sum(map(self._usage, answers), Usage())
            if not endings:
                return [], usage
            found = [rows for answer in answers for rows in prompt_rows(answer)]
            return [logprobs_of(*one) for one in zip(found, endings, strict=True)], usage

    def _usage(self, answer: Json) -> Usage:
        size = 1 if self._salt else self._server().cached_block_size
        details = (answer.get("usage") or {}).get("completion_tokens_details") or {}
        num_forced = int(details.get(FORCED) or 0)
        return replace(read_usage(answer), cached_block_size=size, forced_tokens=num_forced)

    # --- requests --------------------------------------------------------------------------------

    async def _run_model(
        self,
        prompt: Prompt,
        body: Json,
        watch: Watch | None = None,
        hints: Callable[[], Hints] = no_hints,
    ) -> Json:
        body = await self._with_prompt(prompt, body, hints)
        try:
            if watch is None:
                return await self.post_batched(body)
            await self._may_use_plugin()  # which says how cached tokens are counted
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            return await self.post(body, watch)
        except BackendError as error:
            if _TRUST_MEDIA_OPTIONS not in str(error):
                raise
        self.refuse(
            "num_frames of a video",
            f"start the server with {_TRUST_MEDIA_OPTIONS}, or leave num_frames out: the server "
            f"then chooses",
        )

    async def chat_body(self, request: SpokenRequest) -> Json:
        return await self._with_prompt(request.prompt, sampling_body(request.sampling, chat=True))

    async def _with_prompt(
        self, prompt: Prompt, body: Json, hints: Callable[[], Hints] = no_hints
    ) -> Json:
        """A request for tokens after `prompt`."""
        body = await self._with_program({**self._prompt_body(prompt), **body}, hints)
        if prompt == TextPrompt(""):  # vLLM rejects an empty string, but not its tokens
            body["prompt"] = await self.ids_of_empty_prompt()
        frames = {m.num_frames for m in prompt.media} if has_media(prompt) else set()
        if len(frames := frames - {None}) > 1:
            self.refuse(
                "videos with different num_frames in one prompt", "use the same num_frames for all"
            )
        if frames:
            body["media_io_kwargs"] = {"video": {"num_frames": frames.pop()}}
        return body

    def _prompt_body(self, prompt: Prompt) -> Json:
        body = prompt_body(prompt)
        if isinstance(prompt, ChatPrompt) and self._chat_template_kwargs:
            body["chat_template_kwargs"] = self._chat_template_kwargs
        return body

    async def _common(self) -> Json:
        """What every request that runs the model has: the model's name, an id that shows the
        program in the server's log, and the salt of its tenant."""
        program = program_id.get()
        ids = {"request_id": f"{program}-{next(_request_numbers)}"} if program else {}
        return {"model": await self.model_name(), **ids, **self._salt}

    async def _with_program(self, body: Json, hints: Callable[[], Hints] = no_hints) -> Json:
        """A request for tokens that names its program, so that routers keep a program's requests
        on one worker, and says what follows it."""
        body = {**await self._common(), **body}
        if program := program_id.get():
            written = write_hints(replace(hints(), program=program))
            body["vllm_xargs"] = {**written, **body.get("vllm_xargs", {})}
        return body

    async def post_batched(self, body: Json) -> Json:
        """On a server with the plugin, requests made at the same moment are sent as one."""
        if not await self._may_use_plugin():
            return await self.post(body)
        try:
            async with asyncio.timeout(self.timeout_s):
                status, answer = await self._server().batcher.post(body)
        except BackendError:
            raise
        except Exception as error:
            self.raise_as_backend_error(error)
        if status != 200:
            problem = answer.get("error") or answer
            raise BackendError(
                f"{self.name} answered {status}: {problem.get('message') or problem}", status=status
            )
        return answer

    # --- what the server is ----------------------------------------------------------------------

    async def model_name(self) -> str:
        return self._model or str((await self._server().model.answer())["id"])

    async def _ask_model(self) -> Json:
        """The model in the server's list, which is the first unless one was named."""
        answer = await self.call(f"{self.url}/v1/models")
        with self.reading():
            models = [{**model, "id": str(model["id"])} for model in answer["data"]]
            return next((model for model in models if model["id"] == self._model), models[0])

    async def _ask_plugin(self) -> bool:
        try:
            stats = await self.call(f"{self.url}/v1/sgl/stats")
        except BackendError as error:
            if error.status is None or error.status in (401, 408, 429) or error.status >= 500:
                raise
            return False  # 404, or the answer of a gateway that does not forward this route
        with self.reading():
            self._server().cached_block_size = int(stats.get("cached_block_size", 1))
        return True


RuntimeEndpoint = VLLM
