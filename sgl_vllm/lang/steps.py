"""The generations of a graph, as they are sent to a server: there, each is a step.

Owns which nodes generate, and what each generation needs. Does not own the form in which steps are
sent (`protocol/step_graph.py`), nor when (`execution.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_vllm.lang.ir import Gen, Tool, parts_of
from sgl_vllm.lang.tracing.nodes import Evaluate, Node, SetVariable, TracedFork, TracedJoin
from sgl_vllm.lang.tracing.standin import StandIn
from sgl_vllm.lang.tracing.trace import Graph
from sgl_vllm.protocol.step_graph import MAX_GRAPH_CHARS, MAX_STEPS, MAX_TOOL_CHARS, Step, StepGraph

_GEN_MAKERS = ("gen", "gen_int", "gen_string")


class Generations(NamedTuple):
    """The generations of a graph: `steps` are sent, and `of_node` has, by the index of a node,
    which steps its generations are, in order."""

    steps: StepGraph
    of_node: Mapping[int, tuple[int, ...]]


@dataclass(slots=True)
class _Prompt:
    """One stream, as far as it has been walked: its last step, the first tool that was called since
    then, and the steps of others whose answers it has got since then."""

    last: int | None = None
    tool: str | None = None
    waits_for: set[int] = field(default_factory=set)

    @property
    def steps(self) -> set[int]:
        """Those that it waits for, its own included."""
        return self.waits_for if self.last is None else {self.last, *self.waits_for}


def generations_of(graph: Graph) -> Generations | None:
    """None if there are fewer than two, which say nothing of what follows, or more than a server
    takes. O(nodes)."""
    prompts = {0: _Prompt()}
    steps: list[Step] = []
    of_node: dict[int, tuple[int, ...]] = {}
    behind: dict[int, set[int]] = {}  # by node: the steps that what it writes waits for
    for node in graph.nodes:
        prompt = prompts[node.stream]
        read = set[int]().union(*(behind[definition.node] for definition in node.reads))
        if isinstance(node.operation, SetVariable):  # its prompt does not wait
            behind[node.index] = read
            continue
        prompt.waits_for |= read
        match node.operation:
            case TracedFork(children):
                for child in children:
                    prompts[child] = _Prompt(prompt.last, prompt.tool, {*prompt.waits_for})
            case TracedJoin(branches, _):
                prompt.waits_for.update(*(prompts[branch].steps for branch in branches))
            case Evaluate():
                prompt.tool = prompt.tool or _tool_of(node)
        for _ in range(_num_generations(node)):
            waits_for = tuple(sorted(prompt.waits_for - {prompt.last}))
            steps.append(Step(prompt.last, prompt.tool, waits_for))
            index = len(steps) - 1
            of_node[node.index] = (*of_node.get(node.index, ()), index)
            prompts[node.stream] = prompt = _Prompt(index)
        behind[node.index] = {*prompt.steps}
    if not 1 < len(steps) <= MAX_STEPS:
        return None
    found = StepGraph(tuple(steps))
    return Generations(found, of_node) if len(found.text) <= MAX_GRAPH_CHARS else None


def _num_generations(node: Node) -> int:
    match node.operation:
        case Evaluate(StandIn() as expr):  # with choices, it is a select
            return int(expr._operation in _GEN_MAKERS and "choices" not in expr._kwargs)
        case Evaluate(expr):
            return sum(isinstance(part, Gen) for part in parts_of(expr))
    return 0


def _tool_of(node: Node) -> str | None:
    """The name of the tool that a node calls, as `Tool.called` has it."""
    match node.operation:
        case Evaluate(Tool() as tool):
            return tool.called[:MAX_TOOL_CHARS]
        case Evaluate(StandIn() as expr) if expr._operation in ("tool", "read_only_tool"):
            function = expr._args[1]
            return Tool(None, function).called[:MAX_TOOL_CHARS] if callable(function) else None
    return None
