"""JSON schema -> an expression over bytes.

Owns: which schemas are ours, and what they mean. What is not ours raises `UnsupportedSchemaError`
and is another backend's (`backend.py`): it is better to hand a schema on than to guess. Pure.

Members of an object come in the order of `properties`, then any others: what stock's backends ask
for, and what makes keys forced text. Two readings of the same schema exist in the field:

    SchemaSemantics.SPEC      JSON schema as its specification says (so do llguidance's users)
    SchemaSemantics.STRICT    as vLLM's default backend, xgrammar: nothing but the listed properties
                      unless `additionalProperties` says so, and `properties` means an object

so a server answers as stock does, and whoever wants the specification can have it.
"""

from __future__ import annotations

import enum
import json
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from sgl_vllm.fsm import numbers, regex
from sgl_vllm.fsm.automaton import (
    COUNTED_STRING,
    EMPTY,
    NAME_STRING,
    PLAIN_STRING,
    STRING,
    Alt,
    ByteDfa,
    Expression,
    JsonString,
    Lazy,
    Literals,
    Seq,
    TooComplexError,
    literal,
)

Schema = dict[str, Any] | bool

MAX_COUNTED_ITEMS = 1_000
MAX_COUNTED_CHARS = 1_000_000
MAX_NODES = 50_000
MAX_WORK = 400_000
"""Members, values and conjunctions that may be looked at: conjunctions of alternatives multiply."""
MAX_PATTERNS_S = 3.0
_MAX_DEPTH = 200


class UnsupportedSchemaError(ValueError):
    """A schema that this module does not take on."""


class SchemaSemantics(enum.Enum):
    """What a schema means where backends differ."""

    SPEC = "spec"
    STRICT = "strict"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONSTRAINTS = _names(
    "$ref allOf anyOf oneOf not if then else const enum type properties required "
    "additionalProperties patternProperties minProperties maxProperties propertyNames "
    "dependencies dependentRequired dependentSchemas unevaluatedProperties items prefixItems "
    "additionalItems minItems maxItems uniqueItems contains minContains maxContains "
    "unevaluatedItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf $dynamicRef $recursiveRef $anchor $dynamicAnchor"
)
_OURS = _names(
    "$ref allOf anyOf oneOf const enum type properties required additionalProperties "
    "patternProperties minProperties maxProperties items prefixItems additionalItems minItems "
    "maxItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum"
)
_OURS_STRICT = _names(
    "$ref anyOf const enum type properties required additionalProperties items minItems maxItems "
    "minLength maxLength"
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    "type": lambda v: (
        v in _TYPES
        if isinstance(v, str)
        else (_is_list(v) and v != [] and all(t in _TYPES for t in v))
    ),
    "required": lambda v: _is_list(v) and all(isinstance(name, str) for name in v),
    "items": lambda v: _is_schema(v) or _is_list(v),
    **dict.fromkeys(_names("additionalProperties additionalItems"), _is_schema),
    **dict.fromkeys(_names("properties patternProperties"), _is_dict),
    **dict.fromkeys(_names("allOf anyOf oneOf enum prefixItems"), _is_list),
    **dict.fromkeys(_names("pattern format"), lambda v: isinstance(v, str)),
    **dict.fromkeys(
        _names("minLength maxLength minItems maxItems minProperties maxProperties minimum maximum"),
        _is_number,
    ),
    **dict.fromkeys(
        _names("exclusiveMinimum exclusiveMaximum"), lambda v: isinstance(v, bool) or _is_number(v)
    ),
}
"""What the values of keywords look like."""

_HEX = "[0-9a-fA-F]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_REG_NAME = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}})"
_PATH_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_AUTHORITY = (
    rf"(?:(?:{_REG_NAME}|:)*@)?(?:\[[0-9a-fA-F:.]+\]|{_REG_NAME}*)(?::[0-9]*)?(?:/{_PATH_CHAR}*)*"
)
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT ]{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": _HOST,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}|/?(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?)"
        rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
    ),
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
}
"""RFC 3339, 4122, 2673, 1123, 3986, 5321, in the syntax of Rust's regex; none of their characters
needs an escape in JSON."""
_OTHERS_FORMATS = _names(
    "ipv6 uri-reference uri-template iri iri-reference duration json-pointer "
    "relative-json-pointer idn-email idn-hostname regex unknown"
)


def compile_schema(
    schema: Schema | str,
    *,
    reading: SchemaSemantics = SchemaSemantics.SPEC,
    any_whitespace: bool = True,
) -> Expression:
    """The JSON texts that are valid against `schema`.

    Costs some ten microseconds per subschema; the automaton behind it costs what is visited.

    Args:
        schema: a schema, or its JSON text.
        reading: what it means where backends differ.
        any_whitespace: whether blanks and line ends may stand between tokens, as stock allows by
            default; without, there are none.

    Raises:
        UnsupportedSchemaError: it is another backend's.
        ValueError: it is no JSON.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise UnsupportedSchemaError("the schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise UnsupportedSchemaError("a schema is an object, true or false")
    try:
        compiler = _Compiler(schema, reading, any_whitespace)
        expression = compiler.value(schema)
        compiler.check_finite()
        return expression
    except RecursionError:
        raise UnsupportedSchemaError("the schema is nested too deeply") from None
    except (regex.UnsupportedPatternError, TooComplexError) as error:
        raise UnsupportedSchemaError(str(error)) from None


class _Compiler:
    def __init__(self, root: Schema, reading: SchemaSemantics, any_whitespace: bool) -> None:
        self._root = root
        self._strict = reading is SchemaSemantics.STRICT
        self.blank: Expression = (
            regex.compile_trusted(r"[ \n\r\t]*").expression if any_whitespace else EMPTY
        )
        self.comma = Seq(self.blank, literal(b","), self.blank)
        self.colon = Seq(self.blank, literal(b":"), self.blank)
        self._made: dict[int, Expression] = {}
        self._kept: list[Any] = []
        self._merged: dict[tuple[int, int], Schema] = {}
        self._merging: set[int] = set()
        self._ways: dict[int, list[list[int]]] = {}
        """For each subschema, by id, the ways to write a value to its end: all the subschemas that
        stand in it for sure."""
        self._depth = 0
        self._work = 0
        self._patterns_s = 0.0
        self._needed: list[int] = []
        """What stands for sure in the object or array made last."""
        self._any: Expression | None = None

    def _spend(self, amount: int) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise UnsupportedSchemaError("the schema and its conjunctions are too large")

    def check_finite(self) -> None:
        """Refuse a schema whose values contain each other without end: no text could close them."""
        pending = list(reversed(self._ways))  # what others need was mostly made after them
        finite: set[int] = set()
        while pending:
            left = []
            for schema in pending:
                if any(finite.issuperset(way) for way in self._ways[schema]):
                    finite.add(schema)
                else:
                    left.append(schema)
            if len(left) == len(pending):
                raise UnsupportedSchemaError("a value that would have to contain itself")
            pending = left

    # -- values ---------------------------------------------------------------------------------

    def value(self, schema: Schema) -> Expression:
        """The values that are valid against `schema`; one expression for each subschema, so that
        a schema which refers to itself ends in itself."""
        if schema is True:
            return self.anything()
        if schema is False:
            raise UnsupportedSchemaError("nothing is valid")
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(f"a schema is an object, not {type(schema).__name__}")
        known = self._made.get(id(schema))
        if known is not None:
            return known
        if len(self._made) > MAX_NODES:
            raise UnsupportedSchemaError(f"more than {MAX_NODES} subschemas")
        holder: list[Expression] = []
        self._made[id(schema)] = Lazy(lambda: holder[0])
        self._kept.append(schema)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnsupportedSchemaError("the schema is nested too deeply")
        expression = self._value(schema)
        self._ways.setdefault(id(schema), [[]])
        self._depth -= 1
        holder.append(expression)
        self._made[id(schema)] = expression
        return expression

    def _value(self, schema: dict[str, Any]) -> Expression:
        self._check(schema)
        constraints = schema.keys() & _CONSTRAINTS
        ours = _OURS_STRICT if self._strict else _OURS
        for name in constraints - ours:
            if name == "uniqueItems" and schema[name] is False:
                constraints = constraints - {name}
                continue
            raise UnsupportedSchemaError(f"{name} is not ours")
        if not constraints:
            return self.anything()
        if "$ref" in constraints:
            target = self._resolve(schema["$ref"])
            others = {k: schema[k] for k in constraints if k != "$ref"}
            return self._same(schema, self._both(target, others) if others else target)
        if "allOf" in constraints:
            merged: Schema = {k: schema[k] for k in constraints if k != "allOf"}
            for branch in _list(schema["allOf"], "allOf"):
                merged = self._both(merged, branch)
            return self._same(schema, merged)
        for name in ("anyOf", "oneOf"):
            if name in constraints:
                return self._any_of(schema, name, constraints)
        if "const" in constraints:
            return self._one_of([schema["const"]], schema)
        if "enum" in constraints:
            return self._one_of(_list(schema["enum"], "enum"), schema)
        return self._typed(schema, constraints)

    def _check(self, schema: dict[str, Any]) -> None:
        """Refuse values of keywords that no schema has."""
        for name, value in schema.items():
            is_right = _SHAPES.get(name)
            if is_right is not None:
                self._spend(1 + (len(value) if isinstance(value, dict | list) else 0))
                if not is_right(value):
                    raise UnsupportedSchemaError(f"the value of {name}")

    def _same(self, schema: dict[str, Any], other: Schema) -> Expression:
        """The values of `schema`, which are those of `other`."""
        self._ways[id(schema)] = [_ids(self._keep(other))]
        return self.value(other)

    def _typed(self, schema: dict[str, Any], constraints: set[str]) -> Expression:
        types = schema.get("type")
        if types is None:
            types = self._implied(constraints)
        elif isinstance(types, str):
            types = [types]
        if "number" in types:
            types = [t for t in types if t != "integer"]
        if self._strict and len(types) > 1 and constraints - {"type"}:
            raise UnsupportedSchemaError("several types with constraints")
        ways = self._ways[id(schema)] = [] if {"object", "array"}.issuperset(types) else [[]]
        make = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": lambda _: Literals(((b"true", None), (b"false", None))),
            "null": lambda _: literal(b"null"),
        }
        options = []
        for name in dict.fromkeys(types):
            options.append(make[name](schema))
            if name in ("object", "array"):
                ways.append(self._needed)
        return options[0] if len(options) == 1 else Alt(options)

    def _implied(self, constraints: set[str]) -> list[str]:
        """The types of a schema without `type`."""
        if not self._strict:
            return list(_TYPES)
        if constraints & {"properties", "additionalProperties"}:
            return ["object"]
        if "items" in constraints:
            return ["array"]
        raise UnsupportedSchemaError("no type")

    def anything(self) -> Expression:
        """Any JSON value."""
        if self._any is None:
            lazy = self._any = Lazy(lambda: Alt(options))
            string = self._quoted(JsonString.of(STRING))
            member = Seq(string, self.colon, lazy)
            options = (
                Literals(((b"true", None), (b"false", None), (b"null", None))),
                regex.compile_trusted(numbers.NUMBER).expression,
                string,
                self._enclosed(b"[", b"]", Seq(lazy, self._repeated(lazy))),
                self._enclosed(b"{", b"}", Seq(member, self._repeated(member))),
            )
        return self._any

    def _quoted(self, text: JsonString) -> Expression:
        return Literals(((b'"', text),))

    def _enclosed(self, begin: bytes, end: bytes, inner: Expression) -> Expression:
        """`inner`, or nothing, in brackets."""
        inside = Alt((Seq(inner, self.blank), EMPTY))
        return Seq(literal(begin), self.blank, inside, literal(end))

    def _repeated(self, item: Expression) -> Expression:
        """Any number of items, each after a comma."""
        lazy = Lazy(lambda: Alt((EMPTY, Seq(self.comma, item, lazy))))
        return lazy

    # -- enumerations ---------------------------------------------------------------------------

    def _one_of(self, values: Sequence[Any], schema: dict[str, Any]) -> Expression:
        allowed = [v for v in values if self._may_be(v, schema)]
        if not allowed:
            raise UnsupportedSchemaError("no value of the enumeration is valid")
        texts: list[tuple[bytes, Expression | None]] = []
        others: list[Expression] = []
        for value in allowed:
            if isinstance(value, dict | list) and value:
                if self._strict:
                    raise UnsupportedSchemaError("an enumeration of objects or arrays")
                others.append(self._exactly(value))
            else:
                texts.append((_text(value), None))
        unique = tuple(dict.fromkeys(texts))
        options = [*([Literals(unique)] if unique else []), *others]
        return options[0] if len(options) == 1 else Alt(options)

    def _exactly(self, value: Any) -> Expression:
        if isinstance(value, list):
            parts: list[Expression] = []
            for item in value:
                parts.extend([self.comma] if parts else [])
                parts.append(self._exactly(item))
            return self._brackets(b"[", b"]", parts)
        if isinstance(value, dict):
            parts = []
            for name, item in value.items():
                parts.extend([self.comma] if parts else [])
                parts.extend([self._key(name), self._exactly(item)])
            return self._brackets(b"{", b"}", parts)
        return literal(_text(value))

    def _brackets(self, begin: bytes, end: bytes, parts: list[Expression]) -> Expression:
        blank = [self.blank] if parts else []
        return Seq(literal(begin), self.blank, *parts, *blank, literal(end))

    @staticmethod
    def _may_be(value: Any, schema: dict[str, Any]) -> bool:
        """Whether a listed value meets what else the schema says, as far as that is simple."""
        for name in schema.keys() & _CONSTRAINTS - {"enum", "const", "type"}:
            raise UnsupportedSchemaError(f"enum with {name}")
        if "const" in schema and "enum" in schema:
            listed = {*map(_identity, schema["enum"])}
            if _identity(value) not in listed:
                return False
        types = schema.get("type")
        if types is None:
            return True
        return any(_is_a(value, t) for t in ([types] if isinstance(types, str) else types))

    # -- alternatives -----------------------------------------------------------------------------

    def _any_of(self, schema: dict[str, Any], name: str, constraints: set[str]) -> Expression:
        branches = _list(schema[name], name)
        rest = {k: schema[k] for k in constraints if k != name}
        if self._strict and rest:
            raise UnsupportedSchemaError(f"{name} beside other constraints")
        resolved = [self._keep(self._both(rest, b)) if rest else b for b in branches]
        options = [b for b in resolved if b is not False]
        if not options:
            raise UnsupportedSchemaError("no branch can be valid")
        self._ways[id(schema)] = [_ids(option) for option in options]
        if name == "oneOf":
            for i, a in enumerate(options):
                for b in options[i + 1 :]:
                    if not self._disjoint(a, b, 0):
                        raise UnsupportedSchemaError("branches of oneOf that may both be valid")
        return Alt([self.value(option) for option in options])

    def _disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        """Whether it is certain that no value is valid against both."""
        if depth > 8:
            return False
        a, b = self._followed(a), self._followed(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        self._check(a)
        self._check(b)
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            return {*map(_identity, values_a)}.isdisjoint(map(_identity, values_b))
        types_a, types_b = self._types(a), self._types(b)
        if types_a is not None and types_b is not None:
            common = types_a & types_b
            if not common:
                return True
            if common != {"object"}:
                return False
        else:
            return False
        properties_a = a.get("properties", {})
        properties_b = b.get("properties", {})
        required_a, required_b = set(a.get("required", ())), set(b.get("required", ()))
        for name in required_a & required_b:
            if (
                name in properties_a
                and name in properties_b
                and self._disjoint(properties_a[name], properties_b[name], depth + 1)
            ):
                return True
        return (
            (b.get("additionalProperties") is False and "patternProperties" not in b)
            and bool(required_a - properties_b.keys())
        ) or (
            (a.get("additionalProperties") is False and "patternProperties" not in a)
            and bool(required_b - properties_a.keys())
        )

    @staticmethod
    def _types(schema: dict[str, Any]) -> set[str] | None:
        values = _values(schema)
        if values is not None:
            return {name for v in values for name in _TYPES[:4] + _TYPES[5:] if _is_a(v, name)}
        types = schema.get("type")
        if types is None:
            return None
        found = {types} if isinstance(types, str) else set(types)
        return (found - {"integer"}) | ({"number"} if "integer" in found else set())

    # -- references and conjunctions --------------------------------------------------------------

    def _resolve(self, reference: Any) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
        if reference not in ("#", "#/") and not reference.startswith("#/"):
            raise UnsupportedSchemaError(f"$ref to an anchor: {reference!r}")
        if not isinstance(target, dict | bool):
            raise UnsupportedSchemaError(f"$ref to what is no schema: {reference!r}")
        return target

    def _followed(self, schema: Schema) -> Schema:
        """The schema behind references that stand alone."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            others = {k: v for k, v in schema.items() if k in _CONSTRAINTS and k != "$ref"}
            target = self._resolve(schema["$ref"])
            if others:
                return self._keep(self._both(target, others))
            schema = target
        raise UnsupportedSchemaError("references that go in a circle")

    def _keep(self, schema: Schema) -> Schema:
        """Memory of ids needs their objects to stay."""
        self._spend(1)
        self._kept.append(schema)
        return schema

    def _both(self, a: Schema, b: Schema) -> Schema:
        """A schema of what is valid against both, where that can be said in one."""
        if a is True or a == {}:
            return b
        if b is True or b == {}:
            return a
        if a is False or b is False:
            return False
        if id(a) in self._merging or id(b) in self._merging:
            raise UnsupportedSchemaError("conjunctions that contain themselves")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnsupportedSchemaError("conjunctions nested too deeply")
        try:
            return self._merged_with(self._followed(a), self._followed(b))
        finally:
            self._depth -= 1

    def _merged_with(self, a: Schema, b: Schema) -> Schema:
        if isinstance(a, bool) or isinstance(b, bool):
            return self._both(a, b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            raise UnsupportedSchemaError("a schema is an object, true or false")
        self._check(a)
        self._check(b)
        known = self._merged.get((id(a), id(b)))
        if known is not None:
            return known
        for one, other in ((a, b), (b, a)):
            if "allOf" in one:
                whole: Schema = {k: v for k, v in one.items() if k != "allOf"}
                for branch in _list(one["allOf"], "allOf"):
                    whole = self._both(whole, branch)
                return self._both(whole, other)
            for name in ("anyOf", "oneOf"):
                if name in one:
                    rest = {k: v for k, v in one.items() if k != name}
                    whole = self._both(rest, other) if rest.keys() & _CONSTRAINTS else other
                    return {
                        name: [self._keep(self._both(whole, x)) for x in _list(one[name], name)]
                    }
        merged: dict[str, Any] = {}
        self._keep(a), self._keep(b)
        self._merged[id(a), id(b)] = merged
        self._merging.add(id(merged))
        for name in (*a, *(n for n in b if n not in a)):
            if name not in _CONSTRAINTS:
                continue
            if name not in a or name not in b:
                merged[name] = a.get(name, b.get(name))
            elif _identity(a[name]) == _identity(b[name]):
                merged[name] = a[name]
            else:
                merged[name] = self._merged_keyword(name, a[name], b[name])
        closed = {"additionalProperties", "patternProperties"}
        for one, other in ((a, b), (b, a)):
            if one.keys() & closed and other.get("properties"):
                extra = other["properties"].keys() - one.get("properties", {}).keys()
                if extra and one.get("additionalProperties", True) is not True:
                    raise UnsupportedSchemaError("additionalProperties across a conjunction")
                if extra and "patternProperties" in one:
                    raise UnsupportedSchemaError("patternProperties across a conjunction")
        self._merging.remove(id(merged))
        return merged

    def _merged_keyword(self, name: str, a: Any, b: Any) -> Any:
        if name == "properties":
            return {
                key: self._keep(self._both(a.get(key, True), b.get(key, True)))
                for key in (*a, *(k for k in b if k not in a))
            }
        if name == "required":
            return [*a, *(x for x in b if x not in a)]
        if name == "type":
            list_a = [a] if isinstance(a, str) else a
            list_b = [b] if isinstance(b, str) else b
            both = [t for t in list_a if t in list_b]
            if "integer" in (*list_a, *list_b) and "number" in (*list_a, *list_b):
                both.append("integer")
            if not both:
                raise UnsupportedSchemaError("no type is left")
            return both
        if name == "enum":
            others = {*map(_identity, b)}
            return [x for x in a if _identity(x) in others]
        if name in ("minimum", "minLength", "minItems", "minProperties"):
            return max(a, b)
        if name in ("maximum", "maxLength", "maxItems", "maxProperties"):
            return min(a, b)
        if name in ("items", "additionalProperties") and not isinstance(a, list):
            return self._keep(self._both(a, b))
        raise UnsupportedSchemaError(f"two different {name}")

    # -- strings and numbers ----------------------------------------------------------------------

    def _string(self, schema: dict[str, Any]) -> Expression:
        low, high = _limits(schema, "minLength", "maxLength")
        if high is not None and high < low:
            raise UnsupportedSchemaError("minLength is above maxLength")
        bounded = bool(low) or high is not None
        automata = []
        if "pattern" in schema:
            automata.append(self._pattern(schema["pattern"]))
        form = schema.get("format")
        if form in _FORMATS:
            automata.append(regex.compile_trusted(f'"(?:{_FORMATS[form]})"'))
        elif form in _OTHERS_FORMATS:
            raise UnsupportedSchemaError(f"format {form!r} is not ours")
        if not automata:
            body = STRING
            if bounded:  # in the strict reading without escapes, as stock's
                body = PLAIN_STRING if self._strict else COUNTED_STRING
            return self._quoted(JsonString.of(body, 0, low, high))
        if bounded:
            if max(low, high or 0) > 300:
                raise UnsupportedSchemaError("a pattern with a long bound of length")
            automata.append(_string_of_length(low, high))
        return self._dfa(automata)

    def _pattern(self, pattern: str) -> ByteDfa:
        began = time.monotonic()
        dfa = regex.json_string_search(pattern)
        self._patterns_s += time.monotonic() - began
        if self._patterns_s > MAX_PATTERNS_S:
            raise UnsupportedSchemaError("the patterns take too long to compile")
        return dfa

    @staticmethod
    def _dfa(automata: Sequence[ByteDfa]) -> Expression:
        dfa = automata[0]
        for other in automata[1:]:
            dfa = regex.combined(dfa, other)
        if regex.is_empty(dfa):
            raise UnsupportedSchemaError("no text is valid")
        return dfa.expression

    def _bounds(self, schema: dict[str, Any]) -> tuple[Decimal | None, Decimal | None, bool, bool]:
        low = _decimal(schema.get("minimum"))
        high = _decimal(schema.get("maximum"))
        above = below = False
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(name)
            if isinstance(value, bool):  # draft 4: says of minimum and maximum
                if name == "exclusiveMinimum":
                    above = value
                else:
                    below = value
            elif value is not None:
                bound = _decimal(value)
                assert bound is not None
                if name == "exclusiveMinimum" and (low is None or bound >= low):
                    low, above = bound, True
                elif name == "exclusiveMaximum" and (high is None or bound <= high):
                    high, below = bound, True
        return low, high, above, below

    def _number(self, schema: dict[str, Any]) -> Expression:
        low, high, above, below = self._bounds(schema)
        if low is None and high is None:
            return regex.compile_trusted(numbers.NUMBER).expression
        try:
            return self._dfa([numbers.decimals(low, high, above, below)])
        except ValueError as error:
            raise UnsupportedSchemaError(str(error)) from None

    def _integer(self, schema: dict[str, Any]) -> Expression:
        low, high, above, below = self._bounds(schema)
        if low is None and high is None:
            if self._strict:
                return regex.compile_trusted("0|-?[1-9][0-9]*").expression
            return regex.compile_trusted(rf"{numbers.INTEGER}(?:\.0+)?").expression
        first = None if low is None else _whole(low, up=True, strict=above)
        last = None if high is None else _whole(high, up=False, strict=below)
        if first is not None and last is not None and first > last:
            raise UnsupportedSchemaError("no number is within the bounds")
        try:
            return self._dfa([numbers.integers(first, last)])
        except ValueError as error:
            raise UnsupportedSchemaError(str(error)) from None

    # -- arrays -----------------------------------------------------------------------------------

    def _array(self, schema: dict[str, Any]) -> Expression:
        low, high = _limits(schema, "minItems", "maxItems")
        if low > MAX_COUNTED_ITEMS or (high or 0) > MAX_COUNTED_ITEMS:
            raise UnsupportedSchemaError("too many items to count")
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            if "prefixItems" in schema:
                raise UnsupportedSchemaError("prefixItems beside a list of items")
            first, rest = rest, schema.get("additionalItems", True)
        prefix = [self.value(item) for item in first if item is not False]
        if len(prefix) < len(first):
            raise UnsupportedSchemaError("an item that nothing can be")
        if rest is False:
            high = len(prefix) if high is None else min(high, len(prefix))
        if high is not None and low > high:
            raise UnsupportedSchemaError("minItems is above maxItems")
        other = self.value(rest) if rest is not False else EMPTY
        self._needed = _ids(*first[:low], *([rest] if low > len(first) else []))
        after: dict[int, Expression] = {}

        def items(count: int) -> Expression:
            """What may come after `count` items."""
            if high is not None and count >= high:
                return EMPTY
            if count >= max(low, len(prefix)) and high is None and count > 0:
                count = max(low, len(prefix), 1)
            if count not in after:
                item = prefix[count] if count < len(prefix) else other
                more = Seq(*([self.comma] if count else []), item, Lazy(lambda: items(count + 1)))
                after[count] = more if count < low else Alt((EMPTY, more))
            return after[count]

        if high == 0:
            return Seq(literal(b"["), self.blank, literal(b"]"))
        some = Seq(prefix[0] if prefix else other, Lazy(lambda: items(1)), self.blank)
        inside = some if low else Alt((EMPTY, some))
        return Seq(literal(b"["), self.blank, inside, literal(b"]"))

    # -- objects ----------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any]) -> Expression:
        properties = schema.get("properties", {})
        required = dict.fromkeys(schema.get("required", []))
        closed = self._strict and "properties" in schema
        additional = schema.get("additionalProperties", not closed)
        patterns = schema.get("patternProperties", {})
        if self._strict and "additionalProperties" in schema and additional is not False:
            raise UnsupportedSchemaError("additionalProperties in the strict reading")
        members: list[_Member] = []
        for name, subschema in properties.items():
            if subschema is False:
                if name in required:
                    raise UnsupportedSchemaError("a required property that nothing can be")
                continue
            members.append(_Member(name, self.value(subschema), name in required))
        automata = {p: self._pattern(p) for p in patterns}
        for name in required:
            if name not in properties:
                if any(a.accepts(_quote(name)) for a in automata.values()):
                    raise UnsupportedSchemaError("a required property that only a pattern names")
                if additional is False:
                    raise UnsupportedSchemaError("a required property that may not be")
                members.append(_Member(name, self.value(additional), True))
        others = self._other_members(members, properties, automata, patterns, additional)
        low, high = _limits(schema, "minProperties", "maxProperties")
        num_required = sum(m.required for m in members)
        if high is not None and high < max(low, num_required):
            raise UnsupportedSchemaError("maxProperties is too low")
        if others is None and low > len(members):
            raise UnsupportedSchemaError("minProperties is too high")
        if low <= num_required:
            low = 0
        if high is not None and high >= len(members) and others is None:
            high = None
        if max(low, high or 0) > MAX_COUNTED_ITEMS:
            raise UnsupportedSchemaError("too many properties to count")
        self._needed = _ids(*[properties.get(name, additional) for name in required])
        tail = _Members(self, members, others, low, high).after(0, 0)
        return Seq(literal(b"{"), self.blank, tail)

    def _other_members(
        self,
        members: Sequence[_Member],
        properties: Mapping[str, Any],
        automata: Mapping[str, ByteDfa],
        patterns: Mapping[str, Any],
        additional: Schema,
    ) -> Expression | None:
        """A member that is none of `properties`; None if there is none."""
        options: list[Expression] = []
        names = {*properties, *(m.name for m in members)}
        quoted = {name: _quote(name) for name in names}
        items = list(automata.items())
        for i, (pattern, dfa) in enumerate(items):
            if any(dfa.accepts(q) for q in quoted.values()):
                raise UnsupportedSchemaError("a property that a pattern names, too")
            for _, other in items[i + 1 :]:
                if not regex.is_empty(regex.combined(dfa, other)):
                    raise UnsupportedSchemaError("patternProperties that overlap")
            if patterns[pattern] is not False:
                options.append(Seq(dfa.expression, self.colon, self.value(patterns[pattern])))
        if additional is not False:
            if automata:
                rest = regex.compile_trusted('"' + _ANY_NAME + '"')
                for dfa in automata.values():
                    rest = regex.combined(rest, dfa, minus=True)
                if quoted:
                    excluded = "|".join(_verbatim(q) for q in quoted.values())
                    rest = regex.combined(rest, regex.compile_untrusted(excluded), minus=True)
                key = rest.expression
            else:
                # A listed name must not come back in another spelling.
                inner = tuple(sorted(q[1:-1] for q in quoted.values()))
                key = self._quoted(JsonString.of(NAME_STRING if inner else STRING, names=inner))
            options.append(Seq(key, self.colon, self.value(additional)))
        if not options:
            return None
        return options[0] if len(options) == 1 else Alt(options)

    def _key(self, name: str) -> Expression:
        return Seq(literal(_quote(name)), self.colon)


class _Member:
    __slots__ = ("name", "required", "value")

    def __init__(self, name: str, value: Expression, required: bool) -> None:
        self.name = name
        self.value = value
        self.required = required


class _Members:
    """What may come inside an object after some of its members.

        {"a": 1, "c": 3|             after(3, 2): "d", or one that is not listed, or the end

    `index` members have been passed, of which some were left out; `count` members have been written
    (counted only as far as it matters).
    """

    def __init__(
        self,
        compiler: _Compiler,
        members: Sequence[_Member],
        others: Expression | None,
        low: int,
        high: int | None,
    ) -> None:
        self._compiler = compiler
        self._members = members
        self._others = others
        self._low = low
        self._high = high
        self._most = max(1, low, high or 0)
        self._made: dict[tuple[int, int], Expression] = {}
        self._keys_by_count: dict[int, list[tuple[bytes, Expression | None]]] = {}
        self._last = list(range(len(members) + 1))
        """For each index, the next member that may not be left out (or the end)."""
        self._num_required = [0] * (len(members) + 1)
        """For each index, the members from there on that may not be left out."""
        for i in reversed(range(len(members))):
            if not members[i].required:
                self._last[i] = self._last[i + 1]
            self._num_required[i] = self._num_required[i + 1] + members[i].required

    def _keys(self, following: int) -> list[tuple[bytes, Expression | None]]:
        """Every member's name, and what comes after it when `following` have been written then."""
        known = self._keys_by_count.get(following)
        if known is None:
            colon = self._compiler.colon
            known = self._keys_by_count[following] = [
                (_quote(member.name), Seq(colon, member.value, self.after(i + 1, following)))
                for i, member in enumerate(self._members)
            ]
        return known

    def after(self, index: int, count: int) -> Expression:
        count = min(count, self._most)
        known = self._made.get((index, count))
        if known is None:
            known = self._made[index, count] = Lazy(lambda: self._after(index, count))
        return known

    def _furthest(self, index: int, count: int) -> int:
        """The last member that may come next: none that must is left out, and enough remain."""
        last = self._last[index]
        if self._others is None and self._low > count:
            last = min(last, len(self._members) - (self._low - count))
        return last

    def _after(self, index: int, count: int) -> Expression:
        options: list[Expression] = []
        full = self._high is not None and count >= self._high
        keys: list[tuple[bytes, Expression | None]] = []
        blank = self._compiler.blank
        last = self._last[index]
        if not full:
            following = min(count + 1, self._most)
            keys = self._keys(following)[index : self._furthest(index, count) + 1]
            if self._high is not None and self._high - count <= self._num_required[index]:
                # Only what may not be left out fits.
                keys = keys[last - index :]
        may_end = last == len(self._members)
        if may_end and self._others is not None and not full:
            options.append(Seq(self._others, self.after(last, count + 1)))
        if keys:
            options.append(Literals(tuple(keys)))
        more: Expression = Alt(options)
        if count and options:
            more = Seq(literal(b","), blank, more)
        ends: list[Expression] = [more] if options else []
        if may_end and count >= self._low:
            ends.append(literal(b"}"))
        return Seq(*([blank] if count else []), Alt(ends))


_ANY_NAME = r'(?:[^"\\\x{0}-\x{1f}]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*'
"""Names in their one spelling, as `NAME_STRING`."""
_ANY_STRING = r'(?:[^"\\\x{0}-\x{1f}]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*'


def _string_of_length(low: int, high: int | None) -> ByteDfa:
    unit = _ANY_STRING[:-1]
    most = "" if high is None else str(high)
    return regex.compile_untrusted(f'"{unit}{{{low},{most}}}"')


def _text(value: Any) -> bytes:
    """A value that holds no others, in JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError):
        raise UnsupportedSchemaError("a value that cannot be written as JSON") from None


def _quote(name: str) -> bytes:
    if not isinstance(name, str):
        raise UnsupportedSchemaError("a name is a string")
    return _text(name)


def _ids(*schemas: Schema) -> list[int]:
    return [id(schema) for schema in schemas if isinstance(schema, dict)]


def _identity(value: Any) -> Hashable:
    """The same for values that are equal in JSON's sense: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset([(k, _identity(v)) for k, v in value.items()])
    if isinstance(value, list):
        return "array", tuple([_identity(v) for v in value])
    return ("boolean", value) if isinstance(value, bool) else value


def _verbatim(text: bytes) -> str:
    return "".join([f"\\x{{{ord(c):x}}}" for c in text.decode()])


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnsupportedSchemaError(f"{name} is a list of one or more")
    return value


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _is_a(value: Any, name: str) -> bool:
    if name == "null":
        return value is None
    if name == "boolean":
        return isinstance(value, bool)
    if name in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return name == "number" or isinstance(value, int) or value.is_integer()
    return isinstance(value, {"object": dict, "array": list, "string": str}[name])


def _count(value: Any, name: str) -> int:
    if not _is_a(value, "integer"):
        raise UnsupportedSchemaError(f"{name} is a whole number")
    if not 0 <= value <= MAX_COUNTED_CHARS:
        raise UnsupportedSchemaError(f"{name} is out of range")
    return int(value)


def _limits(schema: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """The values of two keywords: 0 without the first, None without the second."""
    high = schema.get(most)
    return _count(schema.get(least, 0), least), None if high is None else _count(high, most)


def _decimal(value: Any) -> Decimal | None:
    if value is None:
        return None
    try:
        return Decimal(repr(value))
    except ValueError:
        raise UnsupportedSchemaError("a bound of too many digits") from None


def _whole(bound: Decimal, *, up: bool, strict: bool) -> int:
    """The first whole number within a bound."""
    whole = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if strict and whole == bound:
        whole += 1 if up else -1
    return whole
