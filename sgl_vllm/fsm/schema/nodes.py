"""A schema as a tree of typed nodes.

Owns the node types. Does not own which values a node admits (`algebra.py`), nor where nodes come
from (`parse.py`). Pure.

    {"$ref": "#/$defs/a", "minLength": 1, "not": B}     All(Reference, ValueSet, Not(B))

A leaf is a set of values (`value_sets.py`). Nodes are compared by identity. References are resolved
when they are first needed, so that a schema can contain itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sgl_vllm.fsm.schema.value_sets import ValueSet


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A node. `place`: a JSON pointer to its subschema; None if it is derived from others."""

    place: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False, slots=True)
class Reference(Placed):
    """`$ref`; `$dynamicRef` if `is_dynamic`. It starts from the URI of its place."""

    text: str
    is_dynamic: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class All(Placed):
    """The values that are valid against all parts: `allOf`, and keywords beside each other.
    Members of an object are written in the order of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class AnyOf(Placed):
    """The values that are valid against any branch."""

    branches: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class OneOf(Placed):
    """The values that are valid against exactly one branch."""

    branches: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class If(Placed):
    """`if`, `then` and `else`."""

    condition: Node
    then: Node
    otherwise: Node


@dataclass(frozen=True, eq=False, slots=True)
class Not(Placed):
    """The values that are invalid against `node`."""

    node: Node


@dataclass(frozen=True, eq=False, slots=True)
class Unevaluated(Placed):
    """The values that are valid against `base`, and whose members and items that `base` does not
    evaluate are valid against `members` and `items`; None: any."""

    base: Node
    members: Node | None
    items: Node | None


Node: TypeAlias = "ValueSet | Reference | All | AnyOf | OneOf | If | Not | Unevaluated"
