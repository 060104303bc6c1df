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
        """Raises UnsupportedSchemaError if a subschema has no value of finite length.

        Cost: a visit to each way, and to each of its subschemas.
        """
        finite = {schema for schema, ways in self._ways.items() if [] in ways}
        if len(finite) == len(self._ways):
            return
        missing: list[int] = []  # of each way, how many parts are not known to be finite
        owners: list[int] = []
        users: dict[int, list[int]] = {}  # the ways that a subschema is part of
        for schema, ways in self._ways.items():
            if schema in finite:
                continue
            for way in ways:
                for part in way:
                    users.setdefault(part, []).append(len(owners))
                missing.append(len(way))
                owners.append(schema)
        pending = [schema for schema in users if schema in finite]
        while pending:
            for number in users.get(pending.pop(), ()):
                missing[number] -= 1
                if not missing[number] and owners[number] not in finite:
                    finite.add(owners[number])
                    pending.append(owners[number])
        if len(finite) < len(self._ways):
            raise UnsupportedSchemaError("a value that would have to contain itself")
