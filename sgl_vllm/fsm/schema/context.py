"""What the compilers of single types share: punctuation, and the way to compile a subschema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple  # Any: JSON values that a schema lists

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Literals, Seq, literal
from sgl_vllm.fsm.json_string import JsonString
from sgl_vllm.fsm.json_whitespace import ARRAY, COLON, COMMA, END, OBJECT
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema.algebra import Algebra
from sgl_vllm.fsm.schema.nodes import Node

_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode


class Context:
    """One compilation, as the compilers of objects, arrays, strings, ... see it.

    Attributes:
        algebra, workspace: the sets of nodes, and the budgets.
        value: compiles a node; None if nothing is valid against it.
        blank: any whitespace between tokens; empty if there is a style.
        opens_object, opens_array, ends, comma: with the style's places, if there is a style.
        colon: the separator of a name and a value, with whitespace around it.
    """

    def __init__(
        self, has_style: bool, algebra: Algebra, value: Callable[[Node], Expression | None]
    ) -> None:
        self.algebra = algebra
        self.workspace = algebra.workspace
        self.value = value
        blank = of_pattern(r"[ \n\r\t]*").expression
        self.blank: Expression = EMPTY if has_style else blank
        places: tuple[Expression, ...] = (OBJECT, ARRAY, END) if has_style else (EMPTY,) * 3
        self.opens_object, self.opens_array, self.ends = places
        self.comma = Seq(literal(b","), COMMA if has_style else blank)
        self.colon = Seq(self.blank, literal(b":"), COLON if has_style else blank)


class Compiled(NamedTuple):
    """Objects or arrays. For each way to complete one: the nodes of values that it contains in any
    case."""

    expression: Expression
    ways: list[list[Node]]


def alternatives(options: Sequence[Expression]) -> Expression | None:
    """Any of some expressions; None if there are none."""
    if len(options) == 1:
        return options[0]
    return Alt(options) if options else None


def string(rest: JsonString) -> Expression:
    """A JSON string, from its opening quote on."""
    return Literals(((b'"', rest),))


def spelled(value: Any) -> bytes:
    """A JSON value that has no parts, as `json.dumps` spells it."""
    if isinstance(value, str) and value.isidentifier():  # nothing in it is escaped
        return f'"{value}"'.encode()
    try:
        return _to_json(value).encode()
    except (ValueError, TypeError):
        raise UnsupportedSchemaError("a value that cannot be written as JSON") from None


def of_dfa(dfa: ByteDfa) -> Expression | None:
    """The texts that an automaton accepts; None if there are none."""
    return None if dfa.is_empty else dfa.expression
