"""A graph as plain data: dicts, lists, strings, numbers, booleans and None.

Owns the encoding. Sends nothing. No code is in a description: deferred values are named operations
(`operations.py`), functions are names.

    {"type": "Graph", "name": ..., "nodes": [{"type": "Node", "index": 0, ...}, ...],
     "values": [{"operation": "leaf", "leaf": {"type": "Argument", "name": "topic"}},
                {"operation": "format", "args": [{"value": 0}, -1, ""]}, ...]}
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import TypeAlias

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.deferred import Deferred, in_order

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def described(graph: Value) -> dict[str, Json]:
    """A dataclass as a dict with its `type`, and recursively so everything in it.

    A deferred value is ``{"value": i}``, where `i` is its place in the list "values", after the
    values it is computed from. A function is ``{"function": "module.name"}``. ValueError for
    any other object.
    """
    description = _Description()
    fields = description.fields_of(graph)
    return {**fields, "values": description.values}


class _Description:
    """One description. Each deferred value is encoded once."""

    def __init__(self) -> None:
        self.values: list[Json] = []
        self._places: dict[Deferred, int] = {}

    def encode(self, value: Value) -> Json:
        match value:
            case enum.Enum():
                return self.encode(value.value)
            case None | bool() | int() | float() | str():
                return value
            case Deferred():
                return {"value": self._place_of(value)}
            case list() | tuple():
                return [self.encode(item) for item in value]
            case Mapping():
                return {"type": "dict", "items": self.encode(list(value.items()))}
            case type() | types.FunctionType() | types.BuiltinFunctionType() | types.MethodType():
                return {"function": f"{value.__module__}.{value.__qualname__}"}
        if dataclasses.is_dataclass(value):
            return self.fields_of(value)
        raise ValueError(f"a {type(value).__qualname__} in a program has no form in JSON")

    def fields_of(self, value: Value) -> dict[str, Json]:
        """A dataclass as a dict. Fields that are None are left out."""
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        encoded = {name: self.encode(part) for name, part in given.items() if part is not None}
        return {"type": type(value).__name__, **encoded}

    def _place_of(self, deferred: Deferred) -> int:
        for value in in_order(deferred, self._places):
            encoded: dict[str, Json] = {"operation": value.operation}
            if value.args:
                encoded["args"] = self.encode(value.args)
            if value.kwargs:
                encoded["kwargs"] = {key: self.encode(arg) for key, arg in value.kwargs}
            if value.leaf is not None:
                encoded["leaf"] = self.encode(value.leaf)
            self._places[value] = len(self.values)
            self.values.append(encoded)
        return self._places[deferred]
