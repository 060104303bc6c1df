"""Calls the function of a program: in this thread, on an event loop, or beside its caller.

Owns how one call is started and what it leaves in its state. What the function submits is run by
its stream; waiting for that is the caller's job.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias  # Any: what a program takes and returns

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.loop import background_loop, error_of, new_future
from sgl_vllm.lang.ordering import NOTHING_PLANNED, PlannedOrders
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.state import AsyncProgramState, ProgramState
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Transcript

Item: TypeAlias = Mapping[str, object]
"""The arguments of one run, by name."""


class Body(ABC):
    """A program's function with its bound arguments, as every run of the program calls it."""

    func: Callable[..., Any]
    bound: Mapping[str, Any]
    is_async: bool
    num_api_spec_tokens: int | None
    state_class: type[ProgramState] = ProgramState
    """What a plain function gets as `s`."""

    @abstractmethod
    def _shared_prompt(self, items: Sequence[Item]) -> Transcript:
        """What the prompts of all `items` begin with, as far as tracing can tell."""

    @abstractmethod
    def _plan_orders(self, items: Sequence[Item]) -> PlannedOrders:
        """The orders of the `any_order`s in the prompts of `items`, as far as tracing can tell."""

    def _new_state(
        self,
        backend: Backend,
        defaults: Sampling,
        *,
        is_streamed: bool = False,
        seen_chars: int = 0,
        planned_orders: PlannedOrders = NOTHING_PLANNED,
    ) -> ProgramState:
        """The state of a new run, which has not begun. The server's cache already has
        `seen_chars` characters of the text to come. `planned_orders` is as in `Run`."""
        called = getattr(self.func, "__qualname__", type(self.func).__qualname__)
        run = Run(
            backend,
            defaults,
            background_loop(),
            program=f"{self.func.__module__}.{called}",
            is_streamed=is_streamed,
            num_api_spec_tokens=self.num_api_spec_tokens,
            planned_orders=planned_orders,
        )
        transcript = self.state_class.transcript_class(seen_chars=seen_chars)
        return self.state_class(Stream(run, transcript=transcript))

    def _call(self, state: ProgramState, /, *args: object, **kwargs: object) -> None:
        """Call a plain function. Operations it submitted may still be running afterwards."""
        # The function must not wait for itself.
        inner = type(state)(state._stream) if state._waits_for_function else state
        state.ret_value = self.func(inner, *args, **{**self.bound, **kwargs})

    async def _call_async(self, state: ProgramState, /, *args: object, **kwargs: object) -> None:
        """Await a coroutine function; it is interrupted if the run is canceled."""
        inner = AsyncProgramState(state._stream)
        call = functools.partial(self.func, inner, *args, **{**self.bound, **kwargs})
        state.ret_value = await state._stream.run.call_function(call)

    def _call_beside(
        self,
        state: ProgramState,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start a run and return: a plain function runs in a thread of its own, a coroutine
        function on the background loop. Both have the contextvars of the caller. From now on,
        readers of `state` wait for the function."""
        kwargs = kwargs or {}
        state._waits_for_function = True
        run = state._stream.run
        run.function_done = new_future()
        stop_timer = run.cancel_after(timeout_s)
        context = run.context_inside()

        def end(error: BaseException | None) -> None:
            run.function_ended(error)
            if timeout_s is not None:
                run.background.start(run.all_ended()).add_done_callback(lambda _: stop_timer())

        def call() -> None:
            try:
                self._call(state, *args, **kwargs)
            except BaseException as error:
                end(error)
            else:
                end(None)

        if self.is_async:
            calling = context.run(run.background.start, self._call_async(state, *args, **kwargs))
            calling.add_done_callback(lambda done: end(error_of(done)))
        else:
            call_inside = functools.partial(context.run, call)
            threading.Thread(target=call_inside, name="sgl-vllm-body", daemon=True).start()
