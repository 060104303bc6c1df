from collections.abc import Callable
from typing import Any, TypeVar

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

_Result = TypeVar("_Result")

class Executor:
    def execute_model(self, scheduler_output: SchedulerOutput) -> object: ...
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object: ...
    def collective_rpc(  # [jump_forward, approximate_reuse]
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
    ) -> list[_Result]: ...
