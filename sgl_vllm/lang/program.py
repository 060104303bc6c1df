"""Programs: `@function`, running one, running many, and the default backend.

Owns the user's function and how its runs are started, waited for and bounded. What happens inside
a run is the interpreter's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

from sgl_vllm.lang.backends.base import Backend, ServerInfo, Usage
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.interpreter import Run, Stream, new_future, result_of
from sgl_vllm.lang.ir import DEFAULT_SAMPLING, Sampling, as_ids, as_stop
from sgl_vllm.lang.loop import background_loop, error_of
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.state import AsyncProgramState, ProgramState, State
from sgl_vllm.lang.transcript import Transcript

if TYPE_CHECKING:
    from sgl_vllm.lang.compiler import CompiledProgram
    from sgl_vllm.lang.tracing.graph import Graph

# How many programs of a batch are under way at the same time with num_threads="auto": what a
# vLLM server batches by default.
AUTO_CONCURRENCY = 256

# There get to be twice as many threads for program bodies when all have been busy for this long.
_GROW_AFTER_S = 0.01

_Results: TypeAlias = Generator[ProgramState | BaseException, None, None]


def set_default_backend(backend: Backend) -> None:
    """Use `backend` for every run that is not given one."""
    global_config.default_backend = backend


def chosen_backend(backend: Backend | None) -> Backend:
    """`backend`, or the default one; BackendError if there is neither."""
    chosen = backend or global_config.default_backend
    if chosen is None:
        raise BackendError(
            "no backend: call set_default_backend(VLLM('http://127.0.0.1:8000')) first, or pass "
            "backend=..."
        )
    return chosen


def flush_cache(backend: Backend | None = None) -> None:
    """Empty the server's prefix cache, and wait for that. `backend` is by default that of
    `set_default_backend`. UnsupportedError on a server without the plugin, BackendError if it does
    not answer."""
    background = background_loop()
    background.wait_for(background.start(chosen_backend(backend).flush_cache()))


def get_server_info(backend: Backend | None = None) -> ServerInfo:
    """What the server runs: model, versions, and the plugin's statistics if it has the plugin.

    BackendError if it does not answer, UnsupportedError for a backend that is no server of one's
    own."""
    background = background_loop()
    return background.wait_for(background.start(chosen_backend(backend).server_info()))


class SamplingDefaults(TypedDict, total=False):
    """What `run` and its kin take as defaults of every `gen`; SGLang's where not given."""

    max_new_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    ignore_eos: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    return_text_in_logprobs: bool


Batch: TypeAlias = Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]


class Program:
    """A function whose first parameter is the prompt it writes; made by `@function`.

    The function is a plain ``def``, whose `s` is a `ProgramState`, or an ``async def``, whose `s`
    is an `AsyncProgramState`. Both kinds run with `run` and `run_batch` where nothing else runs on
    the thread, and with `run_async` and `run_batch_async` in a program that is async itself.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        bound: Mapping[str, Any] | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        parameters = list(inspect.signature(func).parameters)
        if not parameters or parameters[0] != "s":
            raise TypeError(f"the first parameter of {func.__name__} must be s, the prompt")
        if num_api_spec_tokens is not None and num_api_spec_tokens < 0:
            raise ValueError(f"num_api_spec_tokens must be 0 or more, not {num_api_spec_tokens}")
        functools.update_wrapper(self, func)
        self.func = func
        self.is_async = inspect.iscoroutinefunction(func)
        self.arg_names = parameters[1:]
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})

    def bind(self, **kwargs: Any) -> Program:
        """This program with some of its arguments given; calls may still replace them. TypeError
        for unknown ones."""
        self._check_names(kwargs)
        return Program(self.func, {**self.bound, **kwargs}, self.num_api_spec_tokens)

    def _check_names(self, names: Mapping[str, Any]) -> None:
        inspect.signature(self.func).bind_partial(None, **names)

    def trace(self, *args: Any, backend: Backend | None = None, **known: Any) -> Graph:
        """The program as a graph: what it appends, forks and joins, and which operation uses which
        variable. The function is not called; the arguments that are given are known, the others
        stand for whatever they will be.

        TraceError where the program does something that has an effect outside of its prompt, or
        decides on what only a run knows; `TraceError.graph` is then what comes before. `backend`
        is there for SGLang's programs and means nothing.
        """
        from sgl_vllm.lang.tracing.trace import trace

        return trace(self, *args, **known)

    def compile(self, *args: Any, backend: Backend | None = None, **known: Any) -> CompiledProgram:
        """A program that runs without calling the function, from its graph; the arguments that
        are given are fixed. It gives the same. TraceError, and `backend`, as in `trace`."""
        from sgl_vllm.lang.compiler import compile_program

        return compile_program(self, *args, **known)

    def cache(self, backend: Backend | None = None, **known: Any) -> Usage:
        """Send what the prompts of all runs begin with to the server, so that it is cached: known
        text and turns, up to the first generation or argument that is not `known`. Does nothing
        if that is short. BackendError if the server cannot be reached."""
        prefix = self._shared_prompt([known])
        if not prefix.is_worth_a_hint:
            return Usage()
        background = background_loop()
        return background.wait_for(background.start(chosen_backend(backend).warm(prefix.prompt())))

    def _shared_prompt(self, items: Sequence[Mapping[str, Any]]) -> Transcript:
        """What the prompts of all `items` begin with, as far as tracing tells."""
        from sgl_vllm.lang.tracing.trace import shared_prefix

        return Transcript.of(shared_prefix(self, items))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `run`; inside another program, ``other(s, ...)`` writes on its prompt."""
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    # --- one run ---------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        return_text_in_logprobs: bool = True,
        stream: bool = False,
        backend: Backend | None = None,
        use_thread: bool = True,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and wait for all of it; its state is returned.

        The sampling arguments are the defaults of every `gen` in it; the others go to the
        function. With `stream` the state is returned at once, and `text_iter` gives the text as it
        comes. Raises the ProgramError of the first operation that failed, and whatever the
        function itself raises; requests still under way are then cancelled. So they are when the
        program has not ended within `timeout_s` seconds; a plain function that does something
        else than reading its prompt is not interrupted. `use_thread` is there for SGLang's
        programs and means nothing.
        """
        defaults = _defaults(
            max_new_tokens=max_new_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            stop_regex=stop_regex,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            ignore_eos=ignore_eos,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        run = self._new_run(backend, defaults, stream=stream)
        state = ProgramState(Stream(run))
        if stream:
            self._start_streamed(run, state, args, kwargs, timeout_s)
            return state
        with _giving_up_on_errors(run, timeout_s):
            if self.is_async:
                run.background.wait_for(
                    run.background.start(self._call_async(state, *args, **kwargs))
                )
            else:
                self._call(state, *args, **kwargs)
            run.background.wait_for(run.check())
        return state

    async def run_async(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | None = None,
        use_thread: bool = True,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """`run`, to be awaited; takes the same arguments. An ``async def`` function runs on this
        event loop, a plain one in a thread; with `stream` both run beside, on the language's own
        loop or in a thread. Cancelling it cancels the requests under way."""
        sampling, kwargs = _split(kwargs)
        run = self._new_run(backend, _defaults(**sampling), stream=stream)
        state = ProgramState(Stream(run))
        if stream:
            self._start_streamed(run, state, args, kwargs, timeout_s)
            return state
        with _giving_up_on_errors(run, timeout_s):
            if self.is_async:
                await self._call_async(state, *args, **kwargs)
            else:
                call = functools.partial(self._call, state, *args, **kwargs)
                await result_of(run.background.start(run.background.in_body_thread(call)))
            await result_of(run.check())
        return state

    def _new_run(self, backend: Backend | None, defaults: Sampling, *, stream: bool = False) -> Run:
        return Run(
            chosen_backend(backend),
            defaults,
            background_loop(),
            stream=stream,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )

    def _call(self, state: ProgramState, /, *args: Any, **kwargs: Any) -> None:
        """Call the function; what it submits may still be under way after."""
        state.ret_value = self.func(state, *args, **{**self.bound, **kwargs})

    async def _call_async(self, state: ProgramState, /, *args: Any, **kwargs: Any) -> None:
        inner = AsyncProgramState(state._stream)
        call = functools.partial(self.func, inner, *args, **{**self.bound, **kwargs})
        state.ret_value = await state._stream.run.call(call)

    def _start_streamed(
        self,
        run: Run,
        state: ProgramState,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float | None,
    ) -> None:
        run.body = body = new_future()
        in_time = run.cancel_after(timeout_s)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                run.cancel()
                body.set_exception(error)
            else:
                body.set_result(None)
            run.background.soon(state._stream.changed)
            if timeout_s is not None:
                run.check().add_done_callback(lambda _: in_time())

        def call() -> None:
            run.body_thread = threading.get_ident()
            try:
                self._call(state, *args, **kwargs)
            except BaseException as error:
                ended(error)
            else:
                ended(None)

        if self.is_async:
            calling = run.background.start(self._call_async(state, *args, **kwargs))
            calling.add_done_callback(lambda done: ended(error_of(done)))
        else:
            threading.Thread(target=call, name="sgl-vllm-body", daemon=True).start()

    # --- many runs -------------------------------------------------------------------------------

    @overload
    def run_batch(
        self,
        batch_kwargs: Batch,
        *,
        generator_style: Literal[False] = ...,
        return_errors: bool = ...,
        backend: Backend | None = ...,
        num_threads: int | Literal["auto"] = ...,
        progress_bar: bool = ...,
        timeout_s: float | None = ...,
        **sampling: Unpack[SamplingDefaults],
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Batch,
        *,
        generator_style: Literal[True],
        return_errors: bool = ...,
        backend: Backend | None = ...,
        num_threads: int | Literal["auto"] = ...,
        progress_bar: bool = ...,
        timeout_s: float | None = ...,
        **sampling: Unpack[SamplingDefaults],
    ) -> Iterator[ProgramState]: ...

    def run_batch(
        self,
        batch_kwargs: Batch,
        *,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        return_errors: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingDefaults],
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per item; the states come in the items' order.

        An item is a dict of arguments or a sequence of positional ones. What all items' prompts
        begin with is sent to the server first, as far as it can be told without running the
        function (`tracing.trace.shared_prefix`). At most `num_threads` programs are under
        way at a time ("auto": 256); a thread is held only while a function body runs, so that
        programs that do not read in their body, and ``async def`` ones, need few. With
        `generator_style` an iterator is returned, which gives each state as soon as it and those
        before it are done. An item's error is raised once all are done (by the iterator: at the
        item's place); with `return_errors` the exception stands in its place instead. `timeout_s`
        bounds each item's run.
        """
        results = self._batch(batch_kwargs, backend, num_threads, timeout_s, sampling).results(
            progress_bar=progress_bar
        )
        if generator_style:
            return _each(results, return_errors=return_errors)
        return _all(list(results), return_errors=return_errors)

    async def run_batch_async(
        self,
        batch_kwargs: Batch,
        *,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        return_errors: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingDefaults],
    ) -> list[ProgramState]:
        """`run_batch`, to be awaited; cancelling it cancels all that is under way. The functions
        run on the language's own event loop, or in threads."""
        batch = self._batch(batch_kwargs, backend, num_threads, timeout_s, sampling)
        bar = _progress_bar(batch.start()) if progress_bar else None
        try:
            for future in batch.start():
                wrapped = asyncio.wrap_future(future)
                await asyncio.wait([wrapped])
                wrapped.exception()  # raised below, if at all
        finally:
            batch.stop()
            if bar is not None:
                bar.close()
        return _all(list(batch.results()), return_errors=return_errors)

    def _batch(
        self,
        batch_kwargs: Batch,
        backend: Backend | None,
        num_threads: int | Literal["auto"],
        timeout_s: float | None,
        sampling: SamplingDefaults,
    ) -> _Batch:
        if num_threads != "auto" and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1 or 'auto', not {num_threads}")
        return _Batch(
            self,
            chosen_backend(backend),
            _defaults(**sampling),
            [_as_kwargs(self, item) for item in batch_kwargs],
            AUTO_CONCURRENCY if num_threads == "auto" else num_threads,
            timeout_s,
        )


@contextmanager
def _giving_up_on_errors(run: Run, timeout_s: float | None) -> Iterator[None]:
    """Cancels the run if what is in the context fails, or if it takes longer than `timeout_s`."""
    in_time = run.cancel_after(timeout_s)
    try:
        yield
    except BaseException:
        run.cancel()
        raise
    finally:
        in_time()


def _defaults(**values: Any) -> Sampling:
    for name in ("stop", "stop_regex"):
        values[name] = as_stop(values.get(name))
    values["stop_token_ids"] = as_ids(values.get("stop_token_ids"))
    return Sampling(**values).over(DEFAULT_SAMPLING)


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling defaults, and the function's arguments."""
    names = SamplingDefaults.__annotations__
    sampling = {key: value for key, value in kwargs.items() if key in names}
    return sampling, {key: value for key, value in kwargs.items() if key not in names}


def _as_kwargs(program: Program, item: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(item, Mapping):
        kwargs = dict(item)
    else:
        if isinstance(item, str):
            raise TypeError("an item of a batch is a dict or a sequence of arguments, not a str")
        kwargs = dict(zip(program.arg_names, item, strict=False))
        if len(kwargs) < len(item):
            raise TypeError(f"{len(item)} arguments for {len(program.arg_names)} parameters")
    program._check_names(kwargs)
    return kwargs


def _each(results: _Results, *, return_errors: bool) -> Iterator[Any]:
    with closing(results):
        for result in results:
            if isinstance(result, BaseException) and not return_errors:
                raise result
            yield result


def _all(results: list[ProgramState | BaseException], *, return_errors: bool) -> list[Any]:
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors and not return_errors:
        errors[0].add_note(
            f"{len(errors)} of {len(results)} programs of the batch failed, this is the first; "
            f"return_errors=True gives the others' states"
        )
        raise errors[0]
    return results


class _Batch:
    """Runs of one program over many items, a bounded number of them at a time.

    A feeder thread starts the bodies in the items' order, plain ones on worker threads and async
    ones on the event loop; a run that has been started holds no thread.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        defaults: Sampling,
        items: Sequence[Mapping[str, Any]],
        concurrency: int,
        timeout_s: float | None,
    ) -> None:
        self._program = program
        self._backend = backend
        self._defaults = defaults
        self._items = items
        self._timeout_s = timeout_s
        self._slots = threading.Semaphore(concurrency)
        self._workers = _Workers(concurrency)
        self._results: list[Future[ProgramState]] = [Future() for _ in items]
        self._runs: dict[int, Run] = {}
        self._seen_chars = 0
        self._warming: Future[Usage] | None = None
        self._started = False
        self._stopped = False

    def start(self) -> list[Future[ProgramState]]:
        """Begin, once; a future per item."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._feed, name="sgl-vllm-batch", daemon=True).start()
        return self._results

    def results(self, *, progress_bar: bool = False) -> _Results:
        """States and errors in the items' order. Closing the iterator cancels the rest."""
        bar = None
        try:
            self.start()
            bar = _progress_bar(self._results) if progress_bar else None
            for result in self._results:
                if not result.done():
                    background_loop().refuse_to_wait()
                error = result.exception()
                yield error if error is not None else result.result()
        finally:
            if bar is not None:
                bar.close()
            self.stop()

    def stop(self) -> None:
        """Cancel what is under way, and start nothing more."""
        self._stopped = True
        if self._warming is not None:
            self._warming.cancel()
        for run in list(self._runs.values()):
            run.cancel()
        self._slots.release()  # lets the feeder see that it is to stop

    def _feed(self) -> None:
        start_one = self._run_one_async if self._program.is_async else self._run_one
        try:
            self._warm()
            for index in range(len(self._items)):
                self._slots.acquire()
                if self._stopped:
                    return
                try:
                    start_one(index)
                except BaseException as error:  # no more threads, say
                    self._done(index, error, lambda: None)
        finally:
            self._workers.close()

    def _warm(self) -> None:
        """Send what all items' prompts begin with.

        It is for speed only: if anything is wrong, the programs themselves will say so.
        """
        if len(self._items) < 2 or not global_config.enable_precache_with_tracing:
            return
        with contextlib.suppress(Exception):
            prefix = self._program._shared_prompt(self._items)
            if prefix.is_worth_a_hint:
                self._warming = background_loop().start(self._backend.warm(prefix.prompt()))
                try:
                    self._warming.result(self._timeout_s)
                    self._seen_chars = len(prefix.text)
                finally:
                    self._warming.cancel()

    def _new_state(self, index: int) -> ProgramState:
        run = self._runs[index] = self._program._new_run(self._backend, self._defaults)
        if self._stopped:
            run.cancel()
        return ProgramState(Stream(run, seen_chars=self._seen_chars))

    def _run_one(self, index: int) -> None:
        def call() -> None:
            state = self._new_state(index)
            in_time = state._stream.run.cancel_after(self._timeout_s)
            try:
                self._program._call(state, **self._items[index])
            except BaseException as error:
                self._done(index, error, in_time)
            else:
                self._finish(index, state, in_time)

        self._workers.submit(call)

    def _run_one_async(self, index: int) -> None:
        state = self._new_state(index)
        in_time = state._stream.run.cancel_after(self._timeout_s)

        def called(done: Future[None]) -> None:
            error = error_of(done)
            if error is not None:
                self._done(index, error, in_time)
            else:
                self._finish(index, state, in_time)

        body = self._program._call_async(state, **self._items[index])
        background_loop().start(body).add_done_callback(called)

    def _finish(self, index: int, state: ProgramState, in_time: Callable[[], None]) -> None:
        checked = state._stream.run.check()
        checked.add_done_callback(lambda done: self._done(index, error_of(done) or state, in_time))

    def _done(
        self, index: int, result: ProgramState | BaseException, in_time: Callable[[], None]
    ) -> None:
        in_time()
        run = self._runs.pop(index, None)
        self._slots.release()
        if isinstance(result, BaseException):
            if run is not None:
                run.cancel()
            self._results[index].set_exception(result)
        else:
            self._results[index].set_result(result)


class _Workers:
    """Threads for program bodies: one, and twice as many whenever all are busy for a moment."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
            if self._threads and self._changed.wait_for(lambda: not self._tasks, _GROW_AFTER_S):
                return
            more = min(max(1, self._threads), self._limit - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._work, name="sgl-vllm-body", daemon=True).start()

    def close(self) -> None:
        """No more tasks; the threads end when the last one is done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._changed.notify_all()
            task()


def _progress_bar(results: Sequence[Future[ProgramState]]) -> Any:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bar = tqdm(total=len(results))
    for result in results:
        result.add_done_callback(lambda _: bar.update())
    return bar


@overload
def function(func: Callable[..., Any]) -> Program: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function, plain or async, whose first parameter is `s`, its prompt.

    Used as ``@function`` or ``@function()``. With `num_api_spec_tokens` a generation may run so
    many tokens past its end, and what comes after it is answered from that as long as it matches
    (API speculative execution): fewer calls and input tokens at services that only offer an API.
    """
    if func is not None:
        return Program(func, num_api_spec_tokens=num_api_spec_tokens)
    return functools.partial(Program, num_api_spec_tokens=num_api_spec_tokens)
