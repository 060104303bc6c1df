"""A schema to an expression: the set of values of each subschema, type by type.

Owns the recursion over subschemas. What a single type allows is in the other modules of this
package.

Members of an object are compiled in the order of `properties`, then any others: what vLLM's
backends ask for, and what makes keys forced text. `members.py` says where the order is free.
"""

from __future__ import annotations

from sgl_vllm.fsm.byte_dfa import CompiledFormat
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import NEVER, Expression, Lazy, Literals
from sgl_vllm.fsm.json_whitespace import styled
from sgl_vllm.fsm.schema.algebra import Algebra
from sgl_vllm.fsm.schema.arrays import compile_array
from sgl_vllm.fsm.schema.context import Context, alternatives, spelled
from sgl_vllm.fsm.schema.keywords import Schema
from sgl_vllm.fsm.schema.nodes import Node, Reference
from sgl_vllm.fsm.schema.objects import compile_object
from sgl_vllm.fsm.schema.parse import Parser
from sgl_vllm.fsm.schema.scalars import compile_number, compile_string, listed_scalars
from sgl_vllm.fsm.schema.value_sets import ValueSet
from sgl_vllm.fsm.schema.workspace import Workspace
from sgl_vllm.protocol.request_keys import ANY

MAX_NODES = 50_000

_MAX_ALTERNATIVES = 64
"""More alternatives at one place, made from complements, would exceed the work that a request may
cost while it runs."""


def compile_schema(schema: Schema, whitespace: str = ANY) -> Expression:
    """The JSON texts that are valid against `schema`: the expression of `compiled_schema`."""
    return compiled_schema(schema, whitespace).expression


def compiled_schema(schema: Schema, whitespace: str) -> CompiledFormat:
    """The JSON texts that are valid against `schema`, with what the tables of its automata take.

    Cost: some tens of microseconds per subschema. The automaton costs what is visited of it.

    Args:
        whitespace: one of `WHITESPACES`; `ANY` is vLLM's default.

    Raises:
        UnsupportedSchemaError: the schema is not compiled here; ask another backend.
    """
    workspace = Workspace()
    try:
        if not isinstance(schema, dict | bool):
            raise UnsupportedSchemaError("a schema must be an object, true or false")
        parser = Parser(schema, workspace)
        compiler = _Compiler(parser, workspace, whitespace != ANY)
        try:
            expression = compiler.value(parser.root)
            if expression is None:
                raise UnsupportedSchemaError("nothing is valid")
            compiler.check_finite()
        finally:
            compiler.close()
        if whitespace != ANY:
            expression = styled(expression, whitespace)
        return CompiledFormat(expression, workspace.table_bytes)
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None
    except UnsupportedSchemaError as error:
        raise UnsupportedSchemaError(f"{error} ({error.place or '#'})") from None


class _Compiler:
    """Compiles one schema. Invariant: one expression for each set of values, so that a schema that
    refers to itself ends in itself."""

    def __init__(self, parser: Parser, workspace: Workspace, has_style: bool) -> None:
        self._algebra = Algebra(parser, workspace)
        self._workspace = workspace
        self._context = Context(has_style, self._algebra, self.value)
        self._made: dict[ValueSet, Expression | None] = {}
        self._ways: dict[ValueSet, list[list[ValueSet]]] = {}
        """The ways to complete a value of a set, as of `Compiled`, unless one needs no others."""
        self._open: dict[ValueSet, Lazy | None] = {}
        """The sets that are being compiled, and what stands for them inside of themselves."""

    def close(self) -> None:
        """Drop the state of the compilation, which contains reference cycles."""
        vars(self).clear()

    def value(self, node: Node) -> Expression | None:
        """The values that are valid against a node; None if there are none."""
        if isinstance(node, ValueSet) and node in self._made:
            return self._made[node]
        with self._workspace.inside(node.place):
            if isinstance(node, Reference):
                return self.value(self._algebra.follow(node))
            values = self._algebra.of(node)
            return self._made[values] if values in self._made else self._compile(values)

    def _compile(self, values: ValueSet) -> Expression | None:
        if values in self._open:
            inside = self._open[values] or Lazy(lambda: self._made[values] or NEVER)
            self._open[values] = inside
            return inside
        if len(self._made) > MAX_NODES:
            raise UnsupportedSchemaError(f"more than {MAX_NODES} subschemas")
        if self._algebra.has_complements:
            sets = (values.objects, values.arrays, values.strings, values.numbers)
            count = max(map(len, sets))
            if count > _MAX_ALTERNATIVES:
                raise UnsupportedSchemaError(f"not, if and oneOf make {count} alternatives")
        self._open[values] = None
        options, ways = self._types(values)
        expression = self._made[values] = alternatives(options)
        itself = self._open.pop(values)
        if itself is not None:
            itself.get()  # so that it does not keep all of this
        if [] not in ways and (itself is not None or expression is not None):
            self._ways[values] = ways
        return expression

    def _types(self, values: ValueSet) -> tuple[list[Expression], list[list[ValueSet]]]:
        """The values of each type, and the ways to complete one."""
        context, found = self._context, []
        if values.strings:
            found = [compile_string(context, one) for one in values.strings if one.values is None]
        if values.numbers:
            found += [compile_number(context, one) for one in values.numbers if one.values is None]
        options = [expression for expression in found if expression is not None]
        if values.atoms or len(found) < len(values.strings) + len(values.numbers):
            texts = dict.fromkeys(map(spelled, listed_scalars(context, values)))
            options += [Literals(tuple([(text, None) for text in texts]))] if texts else []
        ways: list[list[ValueSet]] = [[]] if options else []
        compiled = [compile_object(context, one) for one in values.objects]
        compiled += [compile_array(context, one) for one in values.arrays]
        for one in compiled:
            if one is not None:
                options.append(one.expression)
                ways += [[self._algebra.of(node) for node in way] for way in one.ways]
        return options, ways

    def check_finite(self) -> None:
        """Raises UnsupportedSchemaError if a set has no value of finite length: its values would
        have to contain themselves. Cost: a visit to each way, and to each of its sets."""
        missing: list[int] = []  # of each way, how many sets are not known to be finite
        users: dict[ValueSet, list[tuple[int, ValueSet]]] = {}  # the ways that a set is part of
        pending: list[ValueSet] = []
        for values, ways in self._ways.items():
            for way in ways:
                parts = [part for part in way if part in self._ways]
                for part in parts:
                    users.setdefault(part, []).append((len(missing), values))
                missing.append(len(parts))
                pending += [] if parts else [values]
        finite: set[ValueSet] = set()
        while pending:
            values = pending.pop()
            for number, user in users.pop(values, ()):
                missing[number] -= 1
                pending += [] if missing[number] else [user]
            finite.add(values)
        if len(finite) < len(self._ways):
            raise UnsupportedSchemaError("a value that would have to contain itself")
