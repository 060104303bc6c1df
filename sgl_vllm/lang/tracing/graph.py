"""What a traced program does: the operations of every prompt, and the variables they hand on.

Owns the graph as a frozen value. How it is made is in `trace.py`, how it runs in `graph_run.py`,
how it is drawn in `views/graph.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.nodes import Node, StreamTrace
from sgl_vllm.lang.tracing.standin import StandIn
from sgl_vllm.lang.views import graph as view


@dataclass(frozen=True)
class Graph:
    """What a program does, as far as that does not depend on what only a run knows.

    `nodes` are in the program's order, which is an order that can run: every node reads only what
    earlier nodes write. `parameters` are the arguments that are unknown, `known` the names of the
    others. `returned` is what the program returns. `stopped` says why the graph ends before the
    program does, if it does.

    `steps` are what the program's function does itself, in its order: what it waits for, and the
    values that it computes. What calls functions of the user's runs after the steps before it.
    """

    name: str
    parameters: tuple[str, ...]
    known: tuple[str, ...]
    streams: tuple[StreamTrace, ...]
    nodes: tuple[Node, ...]
    returned: Value
    steps: tuple[StandIn, ...] = field(default=(), repr=False)
    stopped: str | None = None

    @property
    def title(self) -> str:
        """The program's name with the arguments that a run takes."""
        return f"{self.name}({', '.join(self.parameters)})"

    def nodes_of(self, stream: int) -> Sequence[Node]:
        """The operations of one stream, in order."""
        return [node for node in self.nodes if node.stream == stream]

    def __str__(self) -> str:
        return view.as_text(self)

    def to_svg(self) -> str:
        """A picture: a column per stream, boxes for operations, curves for variables."""
        return view.as_svg(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page with the picture and the text of every operation. Written to `path` if given."""
        page = view.as_html(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow: auto">{self.to_svg()}</div>'
