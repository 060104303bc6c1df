"""SGLang's view of a traced program: the graph by its last node."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sgl_vllm.lang.tracing.graph import Graph


@dataclass(frozen=True)
class TracedProgram(Graph):
    """A program's graph, with SGLang's `last_node`."""

    @classmethod
    def of(cls, graph: Graph) -> TracedProgram:
        """The same graph."""
        return cls(**{field.name: getattr(graph, field.name) for field in fields(graph)})

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
