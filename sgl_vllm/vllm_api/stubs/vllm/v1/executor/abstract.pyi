from collections.abc import Callable
from typing import Any, TypeVar

from vllm.v1.core.sched.output import GrammarOutput

_Result = TypeVar("_Result")

class Executor:
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object: ...  # [self_check]
    def collective_rpc(  # [approximate_reuse]
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
    ) -> list[_Result]: ...
