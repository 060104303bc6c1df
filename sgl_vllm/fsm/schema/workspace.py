"""What one compilation may cost, and the schemas that it derives from the given one.

Owns the budgets of work, depth and time, the check of each keyword's value (which is where work is
counted), and the lifetime of derived schemas. Does not own what any of them mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined, of_texts
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.regex import json_string_search
from sgl_vllm.fsm.schema.keywords import SHAPES, Schema, Several

MAX_WORK = 400_000
"""Members, values and conjunctions that are looked at: conjunctions of alternatives multiply."""

_COMBINING = 100
"""The work of combining two automata, in the unit of `MAX_WORK`."""

MAX_DEPTH = 200
MAX_PATTERNS_S = 3.0


class Workspace:
    """The budgets of one compilation.

    Invariant: every schema that is remembered by its id is kept alive here, so ids are unique.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._work = 0
        self._patterns_s = 0.0
        self._kept: list[Schema] = []
        self._checked: set[int] = set()
        self._combined: dict[tuple[ByteDfa, ByteDfa, bool], ByteDfa] = {}
        self._texts: dict[tuple[bytes, ...], ByteDfa] = {}

    def spend(self, amount: int) -> None:
        """Raises UnsupportedSchemaError beyond `MAX_WORK`."""
        self._work += amount
        if self._work > MAX_WORK:
            raise UnsupportedSchemaError("the schema and its conjunctions are too large")

    def descend(self) -> None:
        """One level deeper; the caller subtracts it from `depth` again."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedSchemaError("the schema is nested too deeply")

    def keep(self, schema: Schema) -> Schema:
        self.spend(1)
        self._kept.append(schema)
        return schema

    def check(self, schema: dict[str, Any]) -> None:
        """Refuse a schema with a malformed keyword. Each schema is looked at once."""
        if id(schema) in self._checked:
            return
        self._checked.add(id(schema))
        self._kept.append(schema)
        work = 0
        for keyword, value in schema.items():
            has_shape = SHAPES.get(keyword)
            if has_shape is None or isinstance(value, Several):
                continue
            work += 1 + (len(value) if isinstance(value, (dict, list)) else 0)
            if not has_shape(value):
                raise UnsupportedSchemaError(f"{keyword} has a value of the wrong type")
        self.spend(work)

    def common(self, a: ByteDfa, b: ByteDfa, *, minus: bool = False) -> ByteDfa:
        """As `combined`; the same automaton for the same two."""
        key = a, b, minus
        known = self._combined.get(key)
        if known is None:
            self.spend(_COMBINING)
            known = self._combined[key] = combined(a, b, minus=minus)
        return known

    def texts(self, texts: Iterable[bytes]) -> ByteDfa:
        """As `of_texts`; the same automaton for the same texts."""
        key = tuple(sorted({*texts}))
        known = self._texts.get(key)
        if known is None:
            self.spend(len(key))
            known = self._texts[key] = of_texts(key)
        return known

    def pattern(self, pattern: str) -> ByteDfa:
        """The automaton of a JSON string in which `pattern` is found."""
        started = monotonic()
        dfa = json_string_search(pattern)
        self._patterns_s += monotonic() - started
        if self._patterns_s > MAX_PATTERNS_S:
            raise UnsupportedSchemaError("the patterns take too long to compile")
        return dfa


def ids(*schemas: Schema) -> list[int]:
    """What a schema is remembered by."""
    return [id(schema) for schema in schemas if isinstance(schema, dict)]
