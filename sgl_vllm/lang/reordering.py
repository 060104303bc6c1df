"""Code movement: the leading pieces of a prompt in another order (the SGLang paper, appendix D).

Owns which pieces can move, the built-in planner, and the check of a planner's answer. The planner
that asks a model is in `planner.py`. Works on graphs; runs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sgl_vllm.lang.ir import Gen, Select, Tool, Var
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.tracing.nodes import Evaluate, Node, TracedFork, TracedJoin, Write
from sgl_vllm.lang.tracing.standin import StandIn, definitions_in
from sgl_vllm.lang.tracing.trace import Graph


class ReorderError(ValueError):
    """A planner's answer that cannot be used."""


@dataclass(frozen=True)
class PromptPiece:
    """A piece of a prompt that may be moved.

    `text` shows it: arguments and variables are in braces, a generation is in brackets.
    `is_constant` says that it is text that all runs have in common. `needs` are the numbers of the
    pieces that must come before it, because it uses their variables or, if it is a tool, because
    the function waits for them before it calls that, or because they are tools before it.
    """

    number: int
    text: str
    is_constant: bool
    is_text: bool
    needs: frozenset[int]


Planner: TypeAlias = Callable[[Sequence[PromptPiece]], Sequence[int]]


def constants_first(pieces: Sequence[PromptPiece]) -> list[int]:
    """The built-in planner: constants first, of the text before the first generation. The order
    among constants, and among all other pieces, stays."""
    end = next((i for i, piece in enumerate(pieces) if not piece.is_text), len(pieces))
    leading = sorted(pieces[:end], key=lambda piece: not piece.is_constant)
    return [piece.number for piece in (*leading, *pieces[end:])]


def reorder(
    graph: Graph, planner: Planner
) -> tuple[Graph, tuple[PromptPiece, ...], tuple[int, ...]]:
    """`graph` with its movable nodes in the planner's order, the pieces, and that order."""
    nodes = _movable(graph)
    pieces = _pieces(nodes, graph)
    order = _checked(planner(pieces), pieces) if pieces else ()
    new_of = {node.index: nodes[number] for node, number in zip(nodes, order, strict=True)}
    moved = tuple(new_of.get(node.index, node) for node in graph.nodes)
    return replace(graph, nodes=moved), pieces, order


def _movable(graph: Graph) -> list[Node]:
    """The leading pieces of the root prompt: neighboring nodes in the same turn, before the first
    fork, from the first text on."""
    region: list[Node] = []
    for node in graph.nodes_of(0):
        match node.operation:
            case Write() | Evaluate(Gen() | Select() | Var() | Tool()):
                region.append(node)
            case Evaluate(StandIn() as expr) if expr._operation not in PRIMITIVES:
                region.append(node)  # which variables a primitive reads is not known
            case _ if any(map(_is_varying, region)):
                break
            case TracedFork() | TracedJoin():
                break
            case _:
                region = []
    return region


def _is_varying(node: Node) -> bool:
    return not (isinstance(node.operation, Write) and node.operation.is_constant)


def _pieces(nodes: Sequence[Node], graph: Graph) -> tuple[PromptPiece, ...]:
    number_of = {node.index: number for number, node in enumerate(nodes)}
    return tuple(
        PromptPiece(
            number,
            node.operation.text if isinstance(node.operation, Write) else f"[{node}]",
            not _is_varying(node),
            isinstance(node.operation, Write) and not node.reads,
            frozenset(number_of[i] for i in _nodes_before(node, nodes, graph) if i in number_of),
        )
        for number, node in enumerate(nodes)
    )


def _nodes_before(node: Node, nodes: Sequence[Node], graph: Graph) -> set[int]:
    """The nodes that must run before `node`: those whose variables it uses and, if it may call
    functions of the user's, those that the function waits for first. Tools keep their order."""
    needed = {read.node for read in node.reads}
    if node.calls != "nothing":
        needed |= {read.node for read in definitions_in(graph.actions[: node.num_actions])}
    if _is_tool(node):
        needed |= {other.index for other in nodes if _is_tool(other) and other.index < node.index}
    return needed


def _is_tool(node: Node) -> bool:
    return node.calls != "nothing" and isinstance(node.operation, Evaluate)


def _checked(order: Sequence[int], pieces: Sequence[PromptPiece]) -> tuple[int, ...]:
    """A planner's answer, if it can be used."""
    answer = tuple(order)
    numbers = {i for i in answer if type(i) is int}
    if len(answer) != len(pieces) or numbers != set(range(len(pieces))):
        raise ReorderError(
            f"the planner's order {list(answer)} is no permutation of the pieces 0 to "
            f"{len(pieces) - 1}"
        )
    for piece in pieces:
        for needed in piece.needs:
            if answer.index(needed) > answer.index(piece.number):
                raise ReorderError(
                    f"the planner's order {list(answer)} puts piece {piece.number} before piece "
                    f"{needed}, which it needs"
                )
    return answer


def difference(pieces: Sequence[PromptPiece], order: Sequence[int]) -> str:
    """`pieces` in their own order and in `order` as a unified diff; "" if nothing moved."""
    before = [line for piece in pieces for line in _lines(piece)]
    after = [line for number in order for line in _lines(pieces[number])]
    return "\n".join(
        difflib.unified_diff(before, after, "before", "after", lineterm="", n=len(before))
    )


def _lines(piece: PromptPiece) -> list[str]:
    # A line break within a piece is shown as one, and the one at its end is not.
    return piece.text.removesuffix("\n").split("\n")
