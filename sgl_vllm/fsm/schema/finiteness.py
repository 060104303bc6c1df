"""Schemas whose values would have to contain themselves, so that no text could end them."""

from __future__ import annotations

from sgl_vllm.fsm.errors import UnsupportedSchemaError


class Finiteness:
    """For each subschema, the ways to complete a value of it.

    A way is the list of subschemas (by id) that such a value contains in any case; a subschema with
    an empty way needs no others.
    """

    def __init__(self) -> None:
        self._ways: dict[int, list[list[int]]] = {}

    def add(self, schema: int, ways: list[list[int]]) -> None:
        """The first call for a subschema counts."""
        self._ways.setdefault(schema, ways)

    def forget(self, schema: int, *, is_used: bool) -> None:
        """No value is valid against a subschema. Unless it is used inside itself, nothing else
        refers to it."""
        self._ways.pop(schema, None)
        if is_used:
            self._ways[schema] = []

    def check(self) -> None:
        """Raises UnsupportedSchemaError if a subschema has no value of finite length."""
        pending = list(reversed(self._ways))  # most subschemas were added after those they need
        finite: set[int] = set()
        while pending:
            left = []
            for schema in pending:
                ways = self._ways[schema]
                if [] in ways or any(finite.issuperset(way) for way in ways):
                    finite.add(schema)
                else:
                    left.append(schema)
            if len(left) == len(pending):
                raise UnsupportedSchemaError("a value that would have to contain itself")
            pending = left
