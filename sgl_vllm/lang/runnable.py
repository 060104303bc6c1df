"""The ways to run a program: once or many times, in a thread or on an event loop.

Owns the methods that run a program, and their arguments. A single call is in `body.py`, many of
them are in `batch.py`. What else a program can do is in `program.py`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import closing

# Any: arguments and values of the user's types
from typing import Any, Generic, Literal, TypeAlias, Unpack, overload

from sgl_vllm.lang.batch import AUTO_CONCURRENCY, Batch, Results, as_item
from sgl_vllm.lang.body import Body, Item
from sgl_vllm.lang.keywords import refuse_unknown
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.options import BatchOptions, Options, P, RunOptions, Takes, called_with_options
from sgl_vllm.lang.settings import chosen_backend
from sgl_vllm.lang.state import AsyncProgramState, ProgramState, R, State
from sgl_vllm.lang.tracing.errors import is_tracing, stop
from sgl_vllm.spelling import did_you_mean

_NO_DEFAULT = inspect.Parameter.empty
RUN_OPTIONS = RunOptions.__annotations__

BatchItems: TypeAlias = Sequence[Mapping[str, Any] | Sequence[Any]]


class Runnable(Body, Takes[P], Generic[P, R]):
    """A function whose first parameter `s` is the prompt it writes, and the ways to run it; see
    `Program`."""

    def __init__(
        self,
        func: Callable[..., Any],
        bound: Mapping[str, Any] | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters)
        if not parameters or parameters[0] != "s":
            raise TypeError(f"the first parameter of {_shown(func)} must be s, the prompt")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{_shown(func)} has a yield, so calling it would not run it: use return, or read "
                f"the text while it is generated with run(stream=True)"
            )
        if num_api_spec_tokens is not None and num_api_spec_tokens < 0:
            raise ValueError(f"num_api_spec_tokens must be 0 or more, not {num_api_spec_tokens}")
        functools.update_wrapper(self, func)
        self.func = func
        self.is_async = inspect.iscoroutinefunction(func)
        self.arg_names = parameters[1:]
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})

    def _check_names(self, names: Mapping[str, Any], options: Iterable[str] = ()) -> None:
        """TypeError for arguments that the function does not take, with the nearest of its
        parameters and `options`."""
        try:
            self._signature.bind_partial(None, **names)
        except TypeError as error:
            takes = ", ".join(self.arg_names) or "no arguments"
            wrong = next((name for name in names if name not in self.arg_names), "")
            instead = did_you_mean(wrong, (*self.arg_names, *options), f"; it takes {takes}")
            raise TypeError(f"{_shown(self.func)} {error}{instead}") from None

    def _split(self, args: Sequence[Any], given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """The options of `run` among the keywords `given`, and the function's own arguments.

        TypeError as by `_check_names`, and if a parameter without a value has the name of an
        option: a keyword of that name sets the option.
        """
        names = {name: value for name, value in given.items() if name not in RUN_OPTIONS}
        self._check_names(names, RUN_OPTIONS)
        takes = self._signature.parameters
        have_values = {*list(takes)[: len(args) + 1], *names, *self.bound}
        for name in (one for one in self.arg_names if one in RUN_OPTIONS):
            if name not in have_values and takes[name].default is _NO_DEFAULT:
                raise TypeError(
                    f"{_shown(self.func)} has a parameter {name}, and run an option of that name: "
                    f"give the argument by position, or with bind({name}=...)"
                )
        options = {name: value for name, value in given.items() if name in RUN_OPTIONS}
        return Options.of(options), names

    # mypy: the first two overlap with the third, for a program whose own argument is a state.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, s: ProgramState, /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, s: AsyncProgramState, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The same as `run`. Inside another program, ``other(s, ...)`` writes to that program's
        prompt."""
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    # --- one run ---------------------------------------------------------------------------------

    @called_with_options
    def run(self, /, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """Run the program, wait until all of it is done, and return its state.

        Keywords with the names of options, which `with_options` lists, are options; all other
        arguments go to the function. The sampling options are the defaults of every `gen`. If they
        are omitted, they are SGLang's: `max_new_tokens=128`, `temperature=1.0`, and neutral values
        of the others. With `stream`, the state is returned immediately, `text_iter` gives the text
        as it is generated, and `cancel` or the end of a ``with`` block stops the run. `backend` is
        by default that of `set_default_backend`.

        Raises the ProgramError of the first operation that failed, unless the function has read
        and caught it, and whatever the function itself raises; requests in flight are then
        canceled. They are also canceled when the program takes longer than `timeout_s` seconds,
        although a plain function is interrupted only where it reads its prompt. `use_thread` is
        accepted for SGLang's programs and ignored.
        """
        options, arguments = self._split(args, kwargs)
        return self._run(options, args, arguments)

    def _run(
        self, options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ProgramState[R]:
        state = self._start(options, args, kwargs)
        if options.stream:
            return state
        run = state._stream.run
        with run.canceled_on_error(options.timeout_s):
            if self.is_async:
                call = run.background.start(self._call_async(state, *args, **kwargs))
                run.background.wait_for(call)
            else:
                self._call(state, *args, **kwargs)
            run.background.run_blocking(run.all_ended)
        return state

    @called_with_options
    async def run_async(self, /, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """`run` as a coroutine, with the same arguments.

        An ``async def`` function runs on this event loop, a plain one in a thread. With `stream`,
        an ``async def`` function runs on the language's own loop. Canceling the coroutine cancels
        the requests in flight.
        """
        options, arguments = self._split(args, kwargs)
        return await self._run_async(options, args, arguments)

    async def _run_async(
        self, options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ProgramState[R]:
        state = self._start(options, args, kwargs)
        if options.stream:
            return state
        run = state._stream.run
        with run.canceled_on_error(options.timeout_s):
            if self.is_async:
                await self._call_async(state, *args, **kwargs)
            else:
                call = functools.partial(self._call, state, *args, **kwargs)
                await result_of(run.background.start(run.background.in_body_thread(call)))
            await run.all_ended()
        return state

    def _start(
        self, options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ProgramState[R]:
        """The state of a new run. If it is streamed, the function has been called."""
        _refuse_in_a_trace()
        backend = chosen_backend(options.backend)
        state = self._new_state(backend, options.sampling, is_streamed=options.stream)
        if options.stream:
            self._call_beside(state, args, kwargs, options.timeout_s)
        return state

    def item(self, /, *args: P.args, **kwargs: P.kwargs) -> Item:
        """These arguments as an item of `run_batch`. TypeError for arguments that the function does
        not take."""
        self._signature.bind_partial(None, *args, **kwargs)
        return {**as_item(args, self.arg_names), **kwargs}

    # --- many runs -------------------------------------------------------------------------------

    @overload
    def run_batch(
        self,
        batch_kwargs: BatchItems,
        *,
        generator_style: Literal[False] = ...,
        **options: Unpack[BatchOptions],
    ) -> list[ProgramState[R]]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: BatchItems,
        *,
        generator_style: Literal[True],
        **options: Unpack[BatchOptions],
    ) -> Generator[ProgramState[R], None, None]: ...

    def run_batch(
        self,
        batch_kwargs: BatchItems,
        *,
        generator_style: bool = False,
        **options: Unpack[BatchOptions],
    ) -> list[ProgramState[R]] | Generator[ProgramState[R], None, None]:
        """Run the program once per item and return the states in the items' order.

        An item is a dict of arguments, or a sequence of positional ones. What all prompts begin
        with is sent to the server first. It is found by calling the function once with stand-ins,
        which sends nothing.

        At most `num_threads` programs run at a time ("auto": 256). A thread is held only while the
        function itself runs, so few are needed for ``async def`` functions and for functions that
        do not read their prompt.

        With `generator_style`, an iterator is returned that gives each state as soon as it and
        those before it are done; its `close` cancels the rest. An item's error is raised
        when all items are done (the iterator raises it in the item's place). With `return_errors`,
        the exception is returned in the item's place instead. `timeout_s` limits each item's run.
        """
        given, batch = self._batch(batch_kwargs, options)
        results = batch.results(progress_bar=given.progress_bar)
        if generator_style:
            return _each(results, return_errors=given.return_errors)
        return _all(list(results), return_errors=given.return_errors)

    async def run_batch_async(
        self, batch_kwargs: BatchItems, **options: Unpack[BatchOptions]
    ) -> list[ProgramState[R]]:
        """`run_batch` as a coroutine. The functions run on the language's own event loop or in
        threads. Canceling the coroutine cancels every run in progress."""
        given, batch = self._batch(batch_kwargs, options)
        with batch.running(progress_bar=given.progress_bar) as futures:
            for future in futures:
                wrapped = asyncio.wrap_future(future)
                try:
                    await asyncio.wait([wrapped])
                    wrapped.exception()  # read, so that asyncio does not log it; raised below
                finally:
                    wrapped.cancel()  # if it is not done: its error is not read any more
        results = [future.exception() or future.result() for future in futures]
        return _all(results, return_errors=given.return_errors)

    def _batch(self, batch_kwargs: BatchItems, given: BatchOptions) -> tuple[Options, Batch]:
        _refuse_in_a_trace()
        where = f"; put arguments of {_shown(self.func)} into the items, or fix them with bind()"
        refuse_unknown("run_batch", given, BatchOptions.__annotations__, where)
        options = Options.of(given)
        if options.num_threads != "auto" and options.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1 or 'auto', not {options.num_threads}")
        return options, Batch(
            self,
            chosen_backend(options.backend),
            options.sampling,
            [self._item(number, given) for number, given in enumerate(batch_kwargs)],
            concurrency=AUTO_CONCURRENCY if options.num_threads == "auto" else options.num_threads,
            timeout_s=options.timeout_s,
        )

    def _item(self, number: int, given: Mapping[str, Any] | Sequence[Any]) -> Item:
        """Item `number` of a batch. TypeError that names it if the function does not take it."""
        try:
            item = as_item(given, self.arg_names)
            self._check_names(item)
        except TypeError as error:
            raise TypeError(f"item {number} of the batch: {error}") from None
        return item


def _refuse_in_a_trace() -> None:
    if is_tracing():
        stop(
            "it starts a run of its own",
            "give the other program this prompt, other(s, ...), or pass its result as an argument",
        )


def _shown(func: Callable[..., Any]) -> str:
    """A function's name in messages."""
    return getattr(func, "__name__", type(func).__name__)


def _each(results: Results, *, return_errors: bool) -> Generator[Any, None, None]:
    with closing(results):
        for result in results:
            if isinstance(result, BaseException) and not return_errors:
                raise result
            yield result


def _all(results: list[ProgramState | BaseException], *, return_errors: bool) -> list[Any]:
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors and not return_errors:
        errors[0].add_note(
            f"{len(errors)} of {len(results)} programs of the batch failed, and this is the first "
            f"error; pass return_errors=True to get the states of the others"
        )
        raise errors[0]
    return results
