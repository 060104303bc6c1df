"""A program with its options given ahead: what is left are calls with its own parameters."""

from __future__ import annotations

from typing import Generic

from sgl_vllm.lang.call_types import P
from sgl_vllm.lang.runnable import Runnable, RunOptions
from sgl_vllm.lang.state import ProgramState, R


class ProgramWithOptions(Generic[P, R]):
    """A program whose options are set, made by `Program.with_options`. Its calls take exactly the
    program's parameters, also those with the name of an option."""

    def __init__(self, program: Runnable[P, R], options: RunOptions) -> None:
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
