"""The backend for a vLLM engine that this process starts: a server that only it can reach.

Owns the lifetime of the engine and of vLLM's own API server, which listens on a Unix domain socket
in a directory of this user's. Requests are those of `vllm.py`. vLLM is imported when the engine
starts.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import socket
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar  # Any: options of vLLM's

from sgl_vllm.lang.backends.requests import ServerInfo
from sgl_vllm.lang.backends.service import Once
from sgl_vllm.lang.backends.vllm import VLLM
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.loop import background_loop

if TYPE_CHECKING:
    from argparse import Namespace

    from openai import AsyncOpenAI
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_Running: TypeAlias = tuple["AsyncLLM", Callable[[], object], "asyncio.Task[None]"]
"""An engine, what stops it, and its server."""

_SERVER_ARGS = {"enable_prompt_tokens_details": True, "trust_request_mm_kwargs": True}
"""Options of the API server, whose only client is this backend."""

_MAX_WAITING_CONNECTIONS = 2048

_SHUTDOWN_TIMEOUT_S = 10.0
"""How long the engine may take to shut down before it is killed."""

_PLUGIN = "sgl_vllm"
"""The plugin's name, and its key in vLLM's `additional_config`."""


class Engine(VLLM):
    """A vLLM engine that runs `model`; `engine_args` are vLLM's own (``dtype=``, ...).

    The engine runs in a separate process. It starts on first use, or at the beginning of a ``with``
    statement, and ends with `close` or at the end of the statement. If it is used after that, it
    starts again. As with vLLM, a script must start it under ``if __name__ == "__main__":``.

    `plugin` activates the sgl_vllm plugin in this engine: True, or a mapping of its options.
    `timeout_s` limits every call, but not the start, which has vLLM's own limit.
    `chat_template_kwargs` are what the model's chat template takes, as for `VLLM`.
    """

    advice_on_no_answer = "see its log; after close() it starts again when it is used"

    def __init__(
        self,
        model: str,
        *,
        plugin: bool | Mapping[str, Any] = False,
        timeout_s: float = 600.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(
            "http://in-process",
            timeout_s=timeout_s,
            max_retries=0,
            chat_template_kwargs=chat_template_kwargs,
        )
        self.model = model
        self._has_plugin = plugin is not False
        args = {"disable_log_stats": True, "enable_log_requests": False, **engine_args}
        if plugin is not False:
            options = {"why_exact": True, **({} if plugin is True else plugin)}
            args["additional_config"] = {**(args.get("additional_config") or {}), _PLUGIN: options}
        self._engine_args = args
        self._directory = tempfile.TemporaryDirectory(prefix="sgl-vllm-")
        self._running: Once[_Running] = Once(self._start)

    @property
    def name(self) -> str:
        return f"the engine of {self.model}"

    # --- lifetime --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine now, and wait until it is ready."""
        background_loop().run_blocking(self._running.answer)

    def close(self) -> None:
        """Shut the engine down, and wait until its process has ended."""
        background_loop().run_blocking(self.aclose)

    async def aclose(self) -> None:
        await asyncio.wrap_future(background_loop().start(self._end()))

    async def _end(self) -> None:
        await super().aclose()
        running, self._running = self._running, Once(self._start)
        if running.was_asked:  # it may still be starting
            with contextlib.suppress(BackendError):
                _, stop, serving = await running.answer()
                await asyncio.to_thread(stop)
                atexit.unregister(stop)
                await serving

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _start(self) -> _Running:
        try:
            Path(self._socket).unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(self._socket)
            listening.listen(_MAX_WAITING_CONNECTIONS)
            with _plugin_allowed() if self._has_plugin else contextlib.nullcontext():
                # In a thread, because it takes seconds.
                engine, args = await asyncio.to_thread(self._new_engine)
                from vllm.entrypoints.launchers.api_server.app_state import init_app_state
                from vllm.entrypoints.launchers.app import build_app

                tasks = await engine.get_supported_tasks()
                with _root_log_level_kept():
                    app = build_app(args, tasks, engine.model_config)
                await init_app_state(engine, app.state, args, tasks)
        except ImportError as error:
            raise BackendError(
                f"{self.name} needs vLLM in this environment ({error}): see `sgl-vllm doctor`"
            ) from error
        except Exception as error:
            raise BackendError(f"{self.name} did not start: {error}") from error
        import uvicorn  # which vLLM brings

        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        app.state.server = server = uvicorn.Server(config)

        def stop() -> None:
            engine.shutdown(_SHUTDOWN_TIMEOUT_S)
            server.should_exit = server.force_exit = True

        async def serve() -> None:
            await server.serve([listening])
            for task in getattr(app.state, "sgl_vllm_ending", ()):  # with the plugin
                task.cancel()

        finalizer = weakref.finalize(self, stop)
        atexit.register(finalizer)  # before multiprocessing waits for the engine's process
        return engine, finalizer, asyncio.create_task(serve())

    def _new_engine(self) -> tuple[AsyncLLM, Namespace]:
        """The engine, and the options of its server."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.entrypoints.launchers.api_server import app_state  # noqa: F401  # slow: off the loop
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_args = suggests(AsyncEngineArgs)(model=self.model, **self._engine_args)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", self.model])
        vars(args).update(vars(engine_args), **_SERVER_ARGS)
        return AsyncLLM.from_engine_args(engine_args), args

    # --- the interface of a backend --------------------------------------------------------------

    @property
    def _socket(self) -> str:
        return os.path.join(self._directory.name, "socket")

    def new_client(self) -> AsyncOpenAI:
        import openai

        base, *_ = openai.DefaultAsyncHttpxClient.__bases__  # httpx's, or httpx2's
        httpx = importlib.import_module(base.__module__.partition(".")[0])
        transport = httpx.AsyncHTTPTransport(uds=self._socket)
        return (
            super()
            .new_client()
            .with_options(http_client=openai.DefaultAsyncHttpxClient(transport=transport))
        )

    async def through_client(self, send: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        await self._running.answer()
        return await super().through_client(send)

    async def aflush_cache(self) -> None:
        engine, *_ = await self._running.answer()
        if not await engine.reset_prefix_cache():
            raise BackendError(
                f"{self.name} did not empty its cache, because requests are using it: try again "
                f"when none is running"
            )

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), url="in process")


@contextlib.contextmanager
def _root_log_level_kept() -> Iterator[None]:
    """A library that vLLM's server imports silences the root logger, which is the program's."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


@contextlib.contextmanager
def _plugin_allowed() -> Iterator[None]:
    """Load the plugin in this process, and in those started inside the ``with`` block, and its
    routes in servers."""
    from importlib.metadata import entry_points  # takes milliseconds, and few programs need it

    from sgl_vllm.plugin import allow_in_environment, register

    if not entry_points(group="vllm.general_plugins", name=_PLUGIN):
        raise BackendError(
            "the sgl_vllm plugin is not installed in this environment: pip install sgl-vllm"
        )
    register()
    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        allow_in_environment()
    elif _PLUGIN not in named.split(","):
        os.environ["VLLM_PLUGINS"] = f"{named},{_PLUGIN}"
    try:
        yield
    finally:
        os.environ.pop("VLLM_PLUGINS", None)
        if named is not None:
            os.environ["VLLM_PLUGINS"] = named
