"""A program with its options given ahead: what is left are calls with its own parameters.

Owns `ProgramWithOptions` and what a run is told beside its arguments. What a run does is in
`program.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.call_types import P
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.state import ProgramState, R

if TYPE_CHECKING:
    from sgl_vllm.lang.program import Program


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, as `run` describes them. `backend` None is the default backend at the
    time of the run."""

    sampling: Sampling
    backend: Backend | None = None
    stream: bool = False
    timeout_s: float | None = None


class ProgramWithOptions(Generic[P, R]):
    """A program whose options are set, made by `Program.with_options`. Its calls take exactly the
    program's parameters, also those with the name of an option."""

    def __init__(self, program: Program[P, R], options: RunOptions) -> None:
        self._program = program
        self._options = options

    def run(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]:
        """As `Program.run`, with these options."""
        self._program._check_names(kwargs)
        return self._program._run(self._options, args, kwargs)

    async def run_async(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]:
        """As `Program.run_async`, with these options."""
        self._program._check_names(kwargs)
        return await self._program._run_async(self._options, args, kwargs)
