"""SGLang's programs and the graphs of their traces."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self  # Any: arguments of the user's function

from sgl_vllm.lang.program import CompiledProgram, Program
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING
from sgl_vllm.lang.tracing.graph import Graph
from sgl_vllm.sglang.states import ProgramState

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""


class SglFunction(Program):
    """A program that runs with SGLang's meanings; made by `function`."""

    state_class = ProgramState

    @property
    def bind_arguments(self) -> dict[str, Any]:
        """The arguments fixed by `bind`."""
        return self.bound

    def bind(self, /, **kwargs: Any) -> SglFunction:
        """As `sgl_vllm.Program.bind`."""
        bound = super().bind(**kwargs)
        assert isinstance(bound, SglFunction)
        return bound

    def _with_default_n(self, options: dict[str, Any]) -> Self:
        """This program with the option `n`, which is removed, as the default of every `gen`. If
        the function has a parameter of that name, `n` is its argument."""
        if "n" in self.arg_names or "n" not in options:
            return self
        program = type(self)(self.func, self.bound, self.num_api_spec_tokens)
        program.default_sampling = replace(DEFAULT_SAMPLING, n=options.pop("n"))
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
        graph = super().trace(*args, **known)
        return TracedProgram(**{field.name: getattr(graph, field.name) for field in fields(graph)})


@dataclass(frozen=True)
class TracedProgram(Graph):
    """A program's graph, with SGLang's `last_node`."""

    @property
    def last_node(self) -> LastNode:
        """The end of the program, from which the graph can be shown."""
        return LastNode(self)


@dataclass(frozen=True)
class LastNode:
    """The last node of `graph`."""

    graph: Graph

    def print_graph_dfs(self) -> str:
        """The graph as text."""
        return str(self.graph)
