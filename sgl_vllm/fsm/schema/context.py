"""What the compilers of single types share: punctuation, and the way to compile a subschema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import NothingValidError
from sgl_vllm.fsm.expressions import EMPTY, Expression, Literals, Seq, literal
from sgl_vllm.fsm.json_string import JsonString
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema.alternatives import Alternatives
from sgl_vllm.fsm.schema.conjunctions import Conjunctions
from sgl_vllm.fsm.schema.keywords import Schema
from sgl_vllm.fsm.schema.values import quoted
from sgl_vllm.fsm.schema.workspace import Workspace


class Context:
    """One compilation, as the compilers of objects, arrays, strings, ... see it.

    Attributes:
        whole_is_integer: whether 1.0 is an integer.
        conjunctions, alternatives: merge subschemas, and find the branches of the result.
        complement: a schema of the values that are invalid against one.
        value: compiles a subschema.
        blank: whitespace between tokens, if there may be any.
        comma, colon: the separators, with whitespace around them.
    """

    def __init__(
        self,
        any_whitespace: bool,
        whole_is_integer: bool,
        workspace: Workspace,
        conjunctions: Conjunctions,
        alternatives: Alternatives,
        complement: Callable[[Schema], Schema],
        value: Callable[[Schema], Expression],
    ) -> None:
        self.whole_is_integer = whole_is_integer
        self.workspace = workspace
        self.conjunctions = conjunctions
        self.alternatives = alternatives
        self.complement = complement
        self.value = value
        self.blank: Expression = of_pattern(r"[ \n\r\t]*").expression if any_whitespace else EMPTY
        self.comma = Seq(self.blank, literal(b","), self.blank)
        self.colon = Seq(self.blank, literal(b":"), self.blank)

    def both(self, a: Schema, b: Schema) -> Schema:
        """A schema, kept alive, of the values that are valid against both `a` and `b`."""
        return self.workspace.keep(self.conjunctions.both(a, b))

    def value_if_any(self, schema: Schema) -> Expression | None:
        """As `value`; None if no value is valid."""
        try:
            return self.value(schema)
        except NothingValidError:
            return None

    def key(self, name: str) -> Expression:
        """A property's name, and the colon."""
        return Seq(literal(quoted(name)), self.colon)

    def enclosed(self, begin: bytes, end: bytes, parts: Sequence[Expression]) -> Expression:
        """`parts`, one after another, in brackets."""
        blank = [self.blank] if parts else []
        return Seq(literal(begin), self.blank, *parts, *blank, literal(end))


class Compiled(NamedTuple):
    """Objects or arrays. For each way to complete one: the subschemas (by id) of which it contains
    a value in any case."""

    expression: Expression
    ways: list[list[int]]


def string(rest: JsonString) -> Expression:
    """A JSON string, from its opening quote on."""
    return Literals(((b'"', rest),))


def of_valid(dfa: ByteDfa) -> Expression:
    """The texts that an automaton accepts.

    Raises NothingValidError: there are none.
    """
    if dfa.is_empty:
        raise NothingValidError("no text is valid")
    return dfa.expression
