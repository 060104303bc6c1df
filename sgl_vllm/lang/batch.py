"""Runs one program over many items, a bounded number of them at a time.

Owns the order in which runs start, the threads that call plain functions, and the shared prefix
that is sent ahead. What one run does is in `body.py` and below.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar  # Any: tqdm has no types

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.body import Body, Item
from sgl_vllm.lang.loop import background_loop, new_future
from sgl_vllm.lang.ordering import NOTHING_PLANNED
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.transcript import Transcript

T = TypeVar("T")

AUTO_CONCURRENCY = 256
"""How many programs run at a time with num_threads="auto": vLLM's default batch size."""

Results: TypeAlias = Generator[ProgramState | BaseException, None, None]


def as_item(given: Mapping[str, object] | Sequence[object], arg_names: Sequence[str]) -> Item:
    """An item of a batch, which may be given as positional arguments, as arguments by name."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"an item is a dict or a sequence of arguments, not {given!r}")
    kwargs = dict(zip(arg_names, given, strict=False))
    if len(kwargs) < len(given):
        raise TypeError(f"{len(given)} arguments for {len(arg_names)} parameters")
    return kwargs


@dataclass(eq=False)
class Batch:
    """The runs of one program over `items`, at most `concurrency` of them at a time.

    A task on the background loop starts the runs in the items' order: coroutine functions on that
    loop, plain functions in threads. Each item has its own copy of the contextvars that the batch
    was started with. A run whose function has returned holds no thread.
    """

    body: Body
    backend: Backend
    defaults: Sampling
    items: Sequence[Item]
    concurrency: int
    timeout_s: float | None

    def __post_init__(self) -> None:
        self._planned_orders = NOTHING_PLANNED
        self._seen_chars = 0
        self._threads = ThreadPoolExecutor(self.concurrency, "sgl-vllm-body")
        self._runs: set[Run] = set()

    def results(self, *, progress_bar: bool = False) -> Results:
        """States and errors in the items' order. Closing the generator cancels the rest."""
        with self.running(progress_bar=progress_bar) as futures:
            futures.reverse()
            while futures:
                future = futures.pop()  # not kept: all states of a batch may not fit into memory
                if not future.done():
                    background_loop().refuse_to_wait()
                error = future.exception()
                yield error if error is not None else future.result()

    @contextlib.contextmanager
    def running(self, *, progress_bar: bool) -> Iterator[list[Future[ProgramState]]]:
        """Start the batch; at the end of the ``with`` block, cancel what is not done."""
        futures: list[Future[ProgramState]] = [new_future() for _ in self.items]
        bar = _progress_bar(futures) if progress_bar else None
        feeding = background_loop().start(self._feed(deque(futures)))
        try:
            yield futures
        finally:
            feeding.cancel()  # start no more
            for run in list(self._runs):
                run.cancel()
            self._threads.shutdown(wait=False)
            if bar is not None:
                bar.close()

    # --- on the background loop ----------------------------------------------------------------

    async def _feed(self, futures: deque[Future[ProgramState]]) -> None:
        await self._warm()
        slots = asyncio.Semaphore(self.concurrency)
        runs: set[asyncio.Task[None]] = set()
        for item in self.items:
            await slots.acquire()
            run = asyncio.create_task(self._run(item, futures.popleft()))
            runs.add(run)
            run.add_done_callback(lambda _: slots.release())
            run.add_done_callback(runs.discard)

    async def _warm(self) -> None:
        """Plan the orders of segments, and send what all prompts begin with.

        This only saves time, so errors are ignored: the runs themselves will report them.
        """
        if len(self.items) < 2 or not global_config.enable_precache_with_tracing:
            return
        with contextlib.suppress(Exception):  # such as "can't start new thread"
            prefix = await self._in_thread(self._trace)
            if prefix.is_worth_warming:
                warming = self.backend.warm(prefix.prompt())
                await asyncio.wait_for(warming, self.timeout_s)
                self._seen_chars = len(prefix.text)

    def _trace(self) -> Transcript:
        """What all prompts begin with. The functions that are traced may raise anything."""
        with contextlib.suppress(BaseException):
            self._planned_orders = self.body._plan_orders(self.items)
        with contextlib.suppress(BaseException):
            return self.body._shared_prompt(self.items)
        return Transcript()

    async def _run(self, item: Item, future: Future[ProgramState]) -> None:
        """Run one item, and wait for all of its operations."""
        state = self.body._new_state(
            self.backend,
            self.defaults,
            seen_chars=self._seen_chars,
            planned_orders=self._planned_orders,
        )
        run = state._stream.run
        self._runs.add(run)
        try:
            with run.canceled_on_error(self.timeout_s):
                if self.body.is_async:
                    await self.body._call_async(state, **item)
                else:
                    await self._in_thread(self.body._call, state, **item)
                await run.all_ended()
        except BaseException as error:  # such as "can't start new thread"
            self._runs.remove(run)  # first: what is in there is canceled at the end of the batch
            future.set_exception(error)
        else:
            self._runs.remove(run)
            future.set_result(state)

    async def _in_thread(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await background_loop().in_body_thread(call, self._threads)


def _progress_bar(results: Sequence[Future[ProgramState]]) -> Any:  # tqdm has no types
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bar = tqdm(total=len(results))
    for result in results:
        result.add_done_callback(lambda _: bar.update())
    return bar
