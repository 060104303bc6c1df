"""Programs: `@function`, running one, running many, and the default backend.

Owns the user's function and how its runs are started, waited for and bounded. What happens inside
a run is the interpreter's.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Literal, TypeAlias, overload

from sgl_vllm.lang.backends.base import Backend, ServerInfo
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.interpreter import ProgramState, Run, Stream
from sgl_vllm.lang.ir import DEFAULT_SAMPLING, Sampling, as_ids, as_stop
from sgl_vllm.lang.loop import background_loop

# How many programs of a batch are under way at the same time with num_threads="auto": what a
# vLLM server batches by default.
AUTO_CONCURRENCY = 256

# There get to be twice as many threads for program bodies when all have been busy for this long.
_GROW_AFTER_S = 0.01

_Results: TypeAlias = Generator[ProgramState | BaseException, None, None]

_default_backend: Backend | None = None


def set_default_backend(backend: Backend) -> None:
    """Use `backend` for every run that is not given one."""
    global _default_backend
    _default_backend = backend


def _backend(backend: Backend | None) -> Backend:
    chosen = backend or _default_backend
    if chosen is None:
        raise BackendError(
            "no backend: call set_default_backend(VLLM('http://127.0.0.1:8000')) first, or pass "
            "backend=..."
        )
    return chosen


def flush_cache(backend: Backend | None = None) -> None:
    """Empty the server's prefix cache. UnsupportedError on a server without the plugin."""
    background = background_loop()
    background.wait_for(background.start(_backend(backend).flush_cache()))


def get_server_info(backend: Backend | None = None) -> ServerInfo:
    """What the server runs: model, versions, and the plugin's statistics if it has the plugin."""
    background = background_loop()
    return background.wait_for(background.start(_backend(backend).server_info()))


class Program:
    """A function whose first parameter is the prompt it writes; made by `@function`."""

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        parameters = list(inspect.signature(func).parameters)
        if not parameters or parameters[0] != "s":
            raise TypeError(f"the first parameter of {func.__name__} must be s, the prompt")
        if inspect.iscoroutinefunction(func):
            raise TypeError(f"{func.__name__} is async: a program is a plain def")
        functools.update_wrapper(self, func)
        self.func = func
        self.arg_names = parameters[1:]
        self._bound = dict(bound or {})

    def bind(self, **kwargs: Any) -> Program:
        """This program with some of its arguments given. TypeError for unknown ones."""
        self._check_names(kwargs)
        return Program(self.func, {**self._bound, **kwargs})

    def _check_names(self, names: Mapping[str, Any]) -> None:
        inspect.signature(self.func).bind_partial(None, **names)

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """The same as `run`."""
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        backend: Backend | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and wait for all of it; its state is returned.

        The sampling arguments are the defaults of every `gen` in it; the others go to the
        function. Raises the ProgramError of the first operation that failed, and whatever the
        function itself raises; requests still under way are then cancelled.
        """
        run = Run(
            _backend(backend),
            _defaults(
                max_new_tokens=max_new_tokens,
                stop=stop,
                stop_token_ids=stop_token_ids,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                ignore_eos=ignore_eos,
                return_logprob=return_logprob,
                top_logprobs_num=top_logprobs_num,
            ),
            background_loop(),
        )
        try:
            state = self._call_in(run, *args, **kwargs)
            run.background.wait_for(run.check())
        except BaseException:
            run.cancel()
            raise
        return state

    def _call_in(self, run: Run, *args: Any, **kwargs: Any) -> ProgramState:
        """Call the function on a new prompt; what it submits may still be under way after."""
        state = ProgramState(Stream(run))
        state.ret_value = self.func(state, *args, **{**self._bound, **kwargs})
        return state

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        generator_style: Literal[False] = ...,
        **options: Any,
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        generator_style: Literal[True],
        **options: Any,
    ) -> Iterator[ProgramState]: ...

    def run_batch(  # type: ignore[misc]  # the overloads' `options` are the arguments below
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        return_errors: bool = False,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per item; the states come in the items' order.

        An item is a dict of arguments or a sequence of positional ones. At most `num_threads`
        programs are under way at a time ("auto": 256); a thread is held only while a function
        body runs, so that programs that do not read in their body need few. With
        `generator_style` an iterator is returned, which gives each state as soon as it and those
        before it are done. An item's error is raised once all are done (by the iterator: at the
        item's place); with `return_errors` the exception stands in its place instead.
        """
        items = [_as_kwargs(self, item) for item in batch_kwargs]
        if num_threads != "auto" and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1 or 'auto', not {num_threads}")
        defaults = _defaults(
            max_new_tokens=max_new_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            ignore_eos=ignore_eos,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
        )
        batch = _Batch(
            self,
            _backend(backend),
            defaults,
            items,
            AUTO_CONCURRENCY if num_threads == "auto" else num_threads,
        )
        results = batch.results(progress_bar=progress_bar)
        if generator_style:
            return _each(results, return_errors=return_errors)
        return _all(list(results), return_errors=return_errors)


def _defaults(**values: Any) -> Sampling:
    values["stop"] = as_stop(values["stop"])
    values["stop_token_ids"] = as_ids(values["stop_token_ids"])
    return Sampling(**values).over(DEFAULT_SAMPLING)


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

    A feeder thread starts the bodies on worker threads in the items' order; a run that has been
    started holds no thread.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        defaults: Sampling,
        items: Sequence[Mapping[str, Any]],
        concurrency: int,
    ) -> None:
        self._program = program
        self._backend = backend
        self._defaults = defaults
        self._items = items
        self._slots = threading.Semaphore(concurrency)
        self._workers = _Workers(concurrency)
        self._results: list[Future[ProgramState]] = [Future() for _ in items]
        self._runs: dict[int, Run] = {}
        self._stopped = False

    def results(self, *, progress_bar: bool) -> _Results:
        """States and errors in the items' order. Closing the iterator cancels the rest."""
        feeder = threading.Thread(target=self._feed, name="sgl-vllm-batch", daemon=True)
        feeder.start()
        bar = _progress_bar(self._results) if progress_bar else None
        try:
            for result in self._results:
                error = result.exception()
                yield error if error is not None else result.result()
        finally:
            if bar is not None:
                bar.close()
            self._stop()

    def _stop(self) -> None:
        self._stopped = True
        for run in list(self._runs.values()):
            run.cancel()
        self._slots.release()  # lets the feeder see that it is to stop

    def _feed(self) -> None:
        try:
            for index in range(len(self._items)):
                self._slots.acquire()
                if self._stopped:
                    return
                self._workers.submit(functools.partial(self._run_one, index))
        finally:
            self._workers.close()

    def _run_one(self, index: int) -> None:
        run = self._runs[index] = Run(self._backend, self._defaults, background_loop())
        if self._stopped:
            run.cancel()
        try:
            state = self._program._call_in(run, **self._items[index])
            finished = run.check()
        except BaseException as error:
            self._done(index, error)
            return
        finished.add_done_callback(lambda done: self._done(index, done.exception() or state))

    def _done(self, index: int, result: ProgramState | BaseException) -> None:
        run = self._runs.pop(index)
        self._slots.release()
        if isinstance(result, BaseException):
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
def function(func: None = None) -> Callable[[Callable[..., Any]], Program]: ...


def function(
    func: Callable[..., Any] | None = None,
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first parameter is `s`, the prompt it writes.

    Used as ``@function`` or ``@function()``.
    """
    return Program(func) if func is not None else Program
