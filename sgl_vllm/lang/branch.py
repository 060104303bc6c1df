"""A branch of a program, as its run and the operations that start and join it know it.

Owns the protocol. The class is in `stream.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.speculation import Ahead
from sgl_vllm.lang.transcript import Transcript, Variable


class Branch(Protocol):
    """The operations of one prompt, run in order."""

    where: str
    """Its name in errors, such as ``fork[1]``. Empty for the root."""

    forked_at: int
    """Where its own text begins."""

    discarded: bool
    """Whether another branch was chosen."""

    @property
    def variables(self) -> Mapping[str, Future[Variable]]:
        """Its variables by name."""

    @property
    def is_of_block(self) -> bool:
        """Whether a block runs it, or a branch of the block."""

    @property
    def children(self) -> Sequence[Branch]:
        """What was forked from it."""

    @property
    def block(self) -> Branch | None:
        """What continues the prompt while this branch runs a block."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or queued."""

    @property
    def error(self) -> ProgramError | None:
        """What has ended it."""

    def begin(self, transcript: Transcript, ahead: Ahead | None, *, is_cached: bool) -> None:
        """Start with what the parent has written, which the server has if `is_cached`."""

    def read(self) -> Future[Transcript]:
        """The transcript once everything submitted so far has run."""

    def fail(self, error: ProgramError) -> None:
        """End it: everything queued or submitted later gets `error`."""

    def cancel(self) -> None:
        """Fail what is running and queued. Does nothing if it is idle."""

    def all_changed(self) -> None:
        """Notify its listeners, and those of all its branches."""
