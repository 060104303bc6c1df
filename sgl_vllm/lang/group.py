"""The branches of a fork: appending to all of them, joining them, and choosing the first.

Owns `ProgramGroup`. A branch itself is a state like any other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future

# Any: what a user's predicate returns
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import Expr
from sgl_vllm.lang.transcript import Transcript
from sgl_vllm.lang.views.capture import picture_of_group
from sgl_vllm.lang.views.shown import Shown
from sgl_vllm.lang.waiting import waiting

if TYPE_CHECKING:
    from sgl_vllm.lang.state import State
    from sgl_vllm.lang.views.picture import Picture

JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]


StateT = TypeVar("StateT", bound="State")


class ProgramGroup(Shown, Generic[StateT]):
    """The branches of a fork. Iterate over them, index them, and join them with `join`."""

    gathers_known_names = True
    """Whether `join` also gathers variables of names that the parent has already. Those of
    `sgl_vllm.sglang` do not."""

    def __init__(self, parent: StateT, states: list[StateT]) -> None:
        self._parent = parent
        self._states = states

    def _picture(self) -> Picture:
        return picture_of_group(self._parent._stream, [state._stream for state in self._states])

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> StateT:
        return self._states[index]

    def __setitem__(self, index: int, state: StateT) -> None:
        """Exists only for ``forks[i] += ...``, which assigns the branch itself."""
        if state is not self._states[index]:
            raise TypeError("a branch cannot be replaced: append to it with +=")

    def __iter__(self) -> Iterator[StateT]:
        return iter(self._states)

    def __iadd__(
        self, value: Callable[[int], Expr | str] | Sequence[Expr | str] | Expr | str
    ) -> ProgramGroup[StateT]:
        """Append to every branch: the same expression, the branch's item of a list, or
        ``function(index)``."""
        if callable(value):
            values: Sequence[Expr | str] = [value(i) for i in range(len(self))]
        elif isinstance(value, (Expr, str)):
            values = [value] * len(self)
        else:
            values = value
            if len(values) != len(self):
                raise ValueError(f"{len(values)} values for {len(self)} branches")
        for state, item in zip(self._states, values, strict=True):
            state._stream.append(item)
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Bring the branches' results back to the parent. Does not wait for them.

        "gather_variable": each variable that the branches set since the fork becomes a variable of
        the parent, a list of its values in branch order. "concate_and_append": the text that each
        branch wrote since the fork is appended to the parent's prompt, in branch order, as plain
        text. Raises ValueError for other modes. Reading the result raises the error of a branch
        that failed.
        """
        parent = self._parent._stream
        streams = [state._stream for state in self._states]
        if mode == "gather_variable":
            names = dict.fromkeys(name for stream in streams for name in stream.bound_names)
            for name in names:
                if name in parent.variables and not self.gathers_known_names:
                    continue
                parent.gather(name, [s for s in streams if name in s.bound_names])
        elif mode == "concate_and_append":
            if streams:
                parent.append_texts(streams)
        else:
            raise ValueError(f"join mode must be gather_variable or concate_and_append, not {mode}")

    # --- the first acceptable branch -----------------------------------------------------------

    def first(self, predicate: Callable[[StateT], Any]) -> Any:
        """Return the first branch to finish that `predicate` accepts, and cancel the others with
        their requests.

        The group then contains that branch alone, also for `join`, and the other branches can no
        longer be read. Returns None if there are no branches or `predicate` accepts none. Raises
        the first branch's error if all have failed. In an ``async def`` program, await the result;
        `predicate` may then be a coroutine function.
        """
        return self._first_async(predicate) if self._parent._is_async else self._first(predicate)

    def _reads(self) -> dict[Future[Transcript], StateT]:
        return {state._stream.read(): state for state in self._states}

    def _first(self, predicate: Callable[[StateT], object]) -> StateT | None:
        reads = self._reads()
        left = list(reads)
        self._parent._stream.run.background.refuse_to_wait()
        while left:
            with waiting(*left):
                ended, _ = concurrent.futures.wait(
                    left, return_when=concurrent.futures.FIRST_COMPLETED
                )
            for read in [read for read in left if read in ended]:
                left.remove(read)
                if read.exception() is None and predicate(reads[read]):
                    return self._choose(reads[read])
        _raise_if_all_failed(list(reads))
        return None

    async def _first_async(self, predicate: Callable[[StateT], object]) -> StateT | None:
        reads = self._reads()
        left = {asyncio.wrap_future(read): read for read in reads}
        for wrapped in left:  # otherwise asyncio logs errors of canceled branches as unread
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        while left:
            with waiting(*left.values()):
                done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for wrapped in sorted(done, key=list(left).index):
                read = left.pop(wrapped)
                if wrapped.exception() is None:
                    accepted = predicate(reads[read])
                    if isinstance(accepted, Awaitable):
                        accepted = await accepted
                    if accepted:
                        return self._choose(reads[read])
        _raise_if_all_failed(list(reads))
        return None

    def _choose(self, winner: StateT) -> StateT:
        for state in self._states:
            if state is not winner:
                state._stream.discard()
        self._states = [winner]
        return winner


def _raise_if_all_failed(reads: Sequence[Future[Transcript]]) -> None:
    errors = [error for read in reads if (error := read.exception()) is not None]
    if errors and len(errors) == len(reads):
        for error in errors:  # the program learns of all of them
            if isinstance(error, ProgramError):
                error.is_handled = True
        raise errors[0]
