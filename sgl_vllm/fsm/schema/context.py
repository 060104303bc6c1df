"""What the compilers of single types share: punctuation, and the way to compile a subschema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import EMPTY, Expression, Literals, Seq, literal
from sgl_vllm.fsm.json_string import JsonString
from sgl_vllm.fsm.rust_regex import compile_trusted
from sgl_vllm.fsm.schema.keywords import Schema, SchemaSemantics
from sgl_vllm.fsm.schema.values import quoted
from sgl_vllm.fsm.schema.workspace import Workspace


class Context:
    """One compilation, as the compilers of objects, arrays, strings, ... see it.

    Attributes:
        value: compiles a subschema.
        blank: white space between tokens, if there may be any.
        comma, colon: the separators, with white space around them.
    """

    def __init__(
        self,
        semantics: SchemaSemantics,
        any_whitespace: bool,
        workspace: Workspace,
        value: Callable[[Schema], Expression],
    ) -> None:
        self.is_strict = semantics is SchemaSemantics.STRICT
        self.workspace = workspace
        self.value = value
        self.blank: Expression = (
            compile_trusted(r"[ \n\r\t]*").expression if any_whitespace else EMPTY
        )
        self.comma = Seq(self.blank, literal(b","), self.blank)
        self.colon = Seq(self.blank, literal(b":"), self.blank)

    def key(self, name: str) -> Expression:
        """A property's name, and the colon."""
        return Seq(literal(quoted(name)), self.colon)

    def enclosed(self, begin: bytes, end: bytes, parts: Sequence[Expression]) -> Expression:
        """`parts`, one after another, in brackets."""
        blank = [self.blank] if parts else []
        return Seq(literal(begin), self.blank, *parts, *blank, literal(end))


@dataclass(frozen=True)
class Compiled:
    """An object or array, and the subschemas (by id) of which it contains a value in any case."""

    expression: Expression
    needed: list[int]


def string(rest: JsonString) -> Expression:
    """A JSON string, from its opening quote on."""
    return Literals(((b'"', rest),))


def all_of(automata: Sequence[ByteDfa]) -> Expression:
    """The texts that all automata accept."""
    dfa = automata[0]
    for other in automata[1:]:
        dfa = combined(dfa, other)
    if dfa.is_empty:
        raise UnsupportedSchemaError("no text is valid")
    return dfa.expression
