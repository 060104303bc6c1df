"""A schema to an expression: dispatch by keyword and by type.

Owns the recursion over subschemas. What a single type or keyword allows is in the other modules of
this package.

Members of an object are compiled in the order of `properties`, then any others: what vLLM's
backends ask for, and what makes keys forced text.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm import numbers
from sgl_vllm.fsm.byte_dfa import CompiledFormat
from sgl_vllm.fsm.errors import (
    NothingValidError,
    TooComplexError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
from sgl_vllm.fsm.expressions import EMPTY, NEVER, Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.json_string import STRING, JsonString
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema import numeric, strings
from sgl_vllm.fsm.schema.alternatives import Alternatives
from sgl_vllm.fsm.schema.arrays import compile_array
from sgl_vllm.fsm.schema.complements import Complements
from sgl_vllm.fsm.schema.conjunctions import Conjunctions
from sgl_vllm.fsm.schema.context import Compiled, Context, string
from sgl_vllm.fsm.schema.enumerations import LISTING, compile_enumeration
from sgl_vllm.fsm.schema.expansions import Expansions
from sgl_vllm.fsm.schema.finiteness import Finiteness
from sgl_vllm.fsm.schema.keywords import (
    CONSTRAINTS,
    TYPES,
    Schema,
    several,
)
from sgl_vllm.fsm.schema.objects import compile_object
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.workspace import Workspace, ids

MAX_NODES = 50_000

_MAX_ALTERNATIVES = 64
"""More alternatives at one place, made from complements, would exceed the work that a request may
cost while it runs."""


def compile_schema(schema: Schema | str, *, any_whitespace: bool = True) -> Expression:
    """The JSON texts that are valid against `schema`: the expression of `compiled_schema`."""
    return compiled_schema(schema, any_whitespace=any_whitespace).expression


def compiled_schema(schema: Schema | str, *, any_whitespace: bool) -> CompiledFormat:
    """The JSON texts that are valid against `schema`, with what the tables of its automata take.

    Cost: some tens of microseconds per subschema. The automaton costs what is visited of it.

    Args:
        schema: a schema, or its JSON text.
        any_whitespace: whether whitespace may stand between tokens, which is vLLM's default; if
            not, there is none.

    Raises:
        UnsupportedSchemaError: the schema is not compiled here; ask another backend.
        ValueError: the text is not JSON.
    """
    try:
        text, schema = _read(schema)
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise UnsupportedSchemaError("a schema must be an object, true or false")
    try:
        compiler = _Compiler(schema, text, any_whitespace)
        expression = compiler.value(schema)
        compiler.finiteness.check()
        return CompiledFormat(expression, compiler.table_bytes)
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None
    except (UnsupportedPatternError, TooComplexError) as error:
        raise UnsupportedSchemaError(str(error)) from None
    except UnsupportedSchemaError as error:
        raise UnsupportedSchemaError(f"{error} ({_place(schema, error.inside)})") from None


def _read(schema: Schema | str) -> tuple[str, Any]:
    """The text of a schema, and what it is."""
    if isinstance(schema, str):
        return schema, json.loads(schema)
    try:
        return json.dumps(schema), schema
    except (TypeError, ValueError):
        raise UnsupportedSchemaError("a schema must be of values that JSON has") from None


_PLAIN = ("string", "integer", "number", "boolean", "null")
"""Types whose values have no parts."""


class _Compiler:
    """Compiles one schema. Invariant: one expression for each subschema, so that a schema that
    refers to itself ends in itself."""

    def __init__(self, root: Schema, text: str, any_whitespace: bool) -> None:
        self._workspace = workspace = Workspace()
        self._references = references = References(root, text)
        self._complements = complements = Complements(references, workspace)
        expansions = Expansions(references, complements, workspace)
        self._conjunctions = conjunctions = Conjunctions(references, workspace, expansions.of)
        self._alternatives = Alternatives(conjunctions, workspace, complements.of)
        self._context = Context(
            any_whitespace,
            references.whole_is_integer,
            workspace,
            conjunctions,
            self._alternatives,
            complements.of,
            self.value,
        )
        self._made: dict[int, Expression] = {}
        self._anything: Expression | None = None
        self._plain: dict[str, Expression] = {}
        self._num_alternatives: dict[int, int] = {}
        self._open: set[int] = set()
        """The subschemas (by id) that are being compiled."""
        self._inside_themselves: dict[int, tuple[list[Expression], Lazy]] = {}
        """The subschemas that refer to themselves: what they are, once that is known, and what
        stands for them until then."""
        self.finiteness = Finiteness()

    @property
    def table_bytes(self) -> int:
        return self._workspace.table_bytes

    def value(self, schema: Schema) -> Expression:
        """The values that are valid against `schema`."""
        if schema is True:
            return self._any_value()
        if schema is False:
            raise NothingValidError("nothing is valid")
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(f"a schema cannot be a {type(schema).__name__}")
        known = self._made.get(id(schema))
        if known is NEVER:
            raise NothingValidError("nothing is valid")
        if known is not None:
            return known
        if id(schema) in self._open:
            return self._inside_itself(schema)
        if len(self._made) > MAX_NODES:
            raise UnsupportedSchemaError(f"more than {MAX_NODES} subschemas")
        if schema.get("type") in _PLAIN and len(CONSTRAINTS.intersection(schema)) == 1:
            return self._plain_value(schema)
        self._open.add(id(schema))
        self._workspace.keep(schema)
        self._workspace.descend()
        try:
            expression = self._value(schema)
        except (UnsupportedPatternError, TooComplexError) as error:
            raise UnsupportedSchemaError(str(error), [id(schema)]) from None
        except UnsupportedSchemaError as error:
            error.inside.append(id(schema))
            if isinstance(error, NothingValidError):
                self._found(schema, NEVER)
                self.finiteness.forget(id(schema), is_used=id(schema) in self._inside_themselves)
            raise
        finally:
            self._workspace.depth -= 1
            self._open.remove(id(schema))
        self.finiteness.add(id(schema), [[]])
        self._found(schema, expression)
        return expression

    def _inside_itself(self, schema: dict[str, Any]) -> Expression:
        """What stands for a subschema that is being compiled, inside of itself."""
        known = self._inside_themselves.get(id(schema))
        if known is None:
            holder: list[Expression] = []
            known = self._inside_themselves[id(schema)] = holder, Lazy(lambda: _held(holder))
        return known[1]

    def _found(self, schema: dict[str, Any], expression: Expression) -> None:
        self._made[id(schema)] = expression
        if id(schema) in self._inside_themselves:
            self._inside_themselves[id(schema)][0].append(expression)

    def _plain_value(self, schema: dict[str, Any]) -> Expression:
        """As `value`, of nothing but a type in `_PLAIN`: most subschemas."""
        self._workspace.keep(schema)
        self.finiteness.add(id(schema), [[]])
        name: str = schema["type"]
        expression = self._plain.get(name)
        if expression is None:
            expression = self._plain[name] = self._typed(schema, {"type"})
        self._made[id(schema)] = expression
        return expression

    def _value(self, schema: dict[str, Any]) -> Expression:
        self._workspace.check(schema)
        constraints = CONSTRAINTS.intersection(schema)
        if not constraints:
            return self._any_value()
        if len(constraints) == 1:
            if "type" in constraints:
                return self._typed(schema, constraints)
            if "$ref" in constraints:
                target = self._references.resolve(schema)
                if target is not schema:
                    return self._same(schema, target)
        rewritten = self._conjunctions.rewritten(schema)
        if rewritten is not schema:
            return self._same(schema, rewritten)
        if "allOf" in constraints:
            merged: Schema = {k: schema[k] for k in constraints if k != "allOf"}
            for branch in schema["allOf"]:
                merged = self._conjunctions.both(merged, branch)
            return self._same(schema, merged)
        if "anyOf" in constraints or "oneOf" in constraints:
            return self._any_of(schema, self._alternatives.of(schema) or [])
        if constraints & LISTING:
            return compile_enumeration(self._context, schema)
        return self._typed(schema, constraints)

    def _same(self, schema: dict[str, Any], other: Schema) -> Expression:
        """The values of `schema`, which are those of `other`."""
        self.finiteness.add(id(schema), [ids(self._workspace.keep(other))])
        expression = self.value(other)
        self._num_alternatives[id(schema)] = self._num_alternatives.get(id(other), 1)
        return expression

    def _any_of(self, schema: dict[str, Any], branches: list[Schema]) -> Expression:
        self.finiteness.add(id(schema), [ids(branch) for branch in branches])
        compiled = [self._context.value_if_any(branch) for branch in branches]
        options = [expression for expression in compiled if expression is not None]
        if not options:
            raise NothingValidError("no branch can be valid")
        expression = options[0] if len(options) == 1 else Alt(options)
        self._num_alternatives[id(schema)] = count = sum(
            self._num_alternatives.get(id(branch), 1) for branch in branches
        )
        if self._complements.are_used and count > _MAX_ALTERNATIVES:
            raise UnsupportedSchemaError(f"not, if and oneOf make {count} alternatives")
        return expression

    def _typed(self, schema: dict[str, Any], constraints: Set[str]) -> Expression:
        types = schema.get("type")
        if types is None:
            types = TYPES
        elif isinstance(types, str):
            types = [types]
        if "number" in types:
            types = [t for t in types if t != "integer"]
        ways: list[list[int]] = [] if {"object", "array"}.issuperset(types) else [[]]
        self.finiteness.add(id(schema), ways)
        options = []
        for name in dict.fromkeys(types):
            try:
                compiled = self._of_type(name, schema)
            except NothingValidError:
                if len(types) == 1:
                    raise
                continue
            if isinstance(compiled, Compiled):
                ways.extend(compiled.ways)
                compiled = compiled.expression
            options.append(compiled)
        if not options:
            raise NothingValidError("no type can be valid")
        return options[0] if len(options) == 1 else Alt(options)

    def _of_type(self, name: str, schema: dict[str, Any]) -> Expression | Compiled:
        if name in ("object", "array") and _excludes_listed(schema):
            unlisted = self._workspace.keep(self._complements.of_listed(schema))
            return Compiled(self.value(unlisted), [ids(unlisted)])
        match name:
            case "object":
                return compile_object(self._context, schema)
            case "array":
                return compile_array(self._context, schema)
            case "string":
                return strings.compile_string(self._context, schema)
            case "number":
                return numeric.compile_number(self._context, schema, whole=False)
            case "integer":
                return numeric.compile_number(self._context, schema, whole=True)
            case "boolean":
                return Literals(((b"true", None), (b"false", None)))
            case _:
                return literal(b"null")

    def _any_value(self) -> Expression:
        """Any JSON value."""
        context = self._context
        if self._anything is None:
            value = self._anything = Lazy(lambda: Alt(options))
            text = string(JsonString.of(STRING))
            options = (
                Literals(((b"true", None), (b"false", None), (b"null", None))),
                of_pattern(numbers.NUMBER).expression,
                text,
                self._any_number_of(b"[", value, b"]"),
                self._any_number_of(b"{", Seq(text, context.colon, value), b"}"),
            )
        return self._anything

    def _any_number_of(self, begin: bytes, item: Expression, end: bytes) -> Expression:
        """Items with commas between them, in brackets."""
        context = self._context
        more = Lazy(lambda: Alt((EMPTY, Seq(context.comma, item, more))))
        inside = Alt((Seq(item, more, context.blank), EMPTY))
        return Seq(literal(begin), context.blank, inside, literal(end))


def _held(holder: list[Expression]) -> Expression:
    if not holder:  # an enumeration that asks which of its values the schema around it allows
        raise UnsupportedSchemaError("an enumeration inside a schema that it depends on")
    return holder[0]


def _excludes_listed(schema: dict[str, Any]) -> bool:
    return any("enum" in rule for rule in several(schema, "not"))


def _place(root: Schema, inside: list[int]) -> str:
    """A JSON pointer to the first of some subschemas (by id) that is part of the document."""
    pointers: dict[int, str] = {}
    stack: list[tuple[Any, str]] = [(root, "#")]
    while stack:
        node, pointer = stack.pop()
        if isinstance(node, dict):
            pointers[id(node)] = pointer
            for name, inner in node.items():
                stack.append((inner, f"{pointer}/{_escaped(name)}"))
        elif isinstance(node, list):
            stack.extend([(inner, f"{pointer}/{i}") for i, inner in enumerate(node)])
    return next((pointers[one] for one in inside if one in pointers), "#")


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
