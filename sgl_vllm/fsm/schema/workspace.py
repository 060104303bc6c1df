"""What one compilation may cost, and the schemas that it derives from the given one.

Owns the budgets of work, depth and time, the check of each keyword's value (which is where work is
counted), and the lifetime of derived schemas. Does not own what any of them mean.
"""

from __future__ import annotations

from time import monotonic
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.regex import json_string_search
from sgl_vllm.fsm.schema.keywords import Schema, has_shape, is_well_formed

MAX_WORK = 400_000
"""Members, values and conjunctions that are looked at: conjunctions of alternatives multiply."""

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
        """Refuse a schema with a malformed keyword."""
        for keyword, value in schema.items():
            if has_shape(keyword):
                self.spend(1 + (len(value) if isinstance(value, dict | list) else 0))
                if not is_well_formed(keyword, value):
                    raise UnsupportedSchemaError(f"{keyword} has a value of the wrong type")

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
