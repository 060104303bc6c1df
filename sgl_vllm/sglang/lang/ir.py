"""SGLang's `sglang.lang.ir`: programs, expressions and patterns under SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack  # Any: arguments of the user's function

from sgl_vllm.lang.function import FunctionProgram
from sgl_vllm.lang.ir import Expr as SglExpr
from sgl_vllm.lang.ir import ExprList as SglExprList
from sgl_vllm.lang.ir import Gen as SglGen
from sgl_vllm.lang.ir import RoleBegin as SglRoleBegin
from sgl_vllm.lang.ir import RoleEnd as SglRoleEnd
from sgl_vllm.lang.ir import Select as SglSelect
from sgl_vllm.lang.ir import Show as SglImage
from sgl_vllm.lang.ir import Show as SglVideo
from sgl_vllm.lang.ir import Text as SglConstantText
from sgl_vllm.lang.ir import Var as SglVariable
from sgl_vllm.lang.ir import VarScopeBegin as SglVarScopeBegin
from sgl_vllm.lang.ir import VarScopeEnd as SglVarScopeEnd
from sgl_vllm.lang.sampling import Sampling, SamplingDefaults
from sgl_vllm.lang.sampling import Sampling as SglSamplingParams
from sgl_vllm.sglang.lang.interpreter import ProgramState
from sgl_vllm.sglang.lang.tracer import TracedProgram

if TYPE_CHECKING:
    from sgl_vllm.lang.compiler import CompiledProgram

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSamplingParams",
    "SglSelect",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVariable",
    "SglVideo",
]

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""


class SglFunction(FunctionProgram):
    """A program that runs with SGLang's meanings; made by `function`."""

    state_class = ProgramState
    _n: int | None = None

    @property
    def bind_arguments(self) -> dict[str, Any]:
        """The arguments fixed by `bind`."""
        return self.bound

    def bind(self, /, **kwargs: Any) -> SglFunction:
        """As `sgl_vllm.Program.bind`."""
        bound = super().bind(**kwargs)
        assert isinstance(bound, SglFunction)
        return bound

    def _run_defaults(self, **given: Unpack[SamplingDefaults]) -> Sampling:
        return Sampling(n=self._n).over(super()._run_defaults(**given))

    def _with_default_n(self, options: dict[str, Any]) -> Self:
        """This program with the option `n`, which is removed, as the default of every `gen`. If
        the function has a parameter of that name, `n` is its argument."""
        if "n" in self.arg_names or "n" not in options:
            return self
        program = type(self)(self.func, self.bound, self.num_api_spec_tokens)
        program._n = options.pop("n")
        return program

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `sgl_vllm.Program.run`, also with `n`, the default of every `gen`."""
        return super(SglFunction, self._with_default_n(kwargs)).run(*args, **kwargs)

    def run_batch(self, batch_kwargs: Any, **kwargs: Any) -> Any:
        """As `sgl_vllm.Program.run_batch`, also with `n`, the default of every `gen`."""
        return super(SglFunction, self._with_default_n(kwargs)).run_batch(batch_kwargs, **kwargs)

    def compile(self, /, *args: Any, backend: Any = None, **known: Any) -> CompiledProgram:
        """As `sgl_vllm.Program.compile`."""
        return super().compile(*args, **known)

    def trace(self, /, *args: Any, backend: Any = None, **known: Any) -> TracedProgram:
        """As `sgl_vllm.Program.trace`."""
        return TracedProgram.of(super().trace(*args, **known))
