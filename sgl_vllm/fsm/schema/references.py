"""`$ref` within one document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import Schema


class References:
    """Resolves JSON pointers (RFC 6901) into one document."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def resolve(self, reference: Any) -> Schema:
        """The subschema that a `$ref` points to.

        Raises UnsupportedSchemaError: it points to another document, to an anchor, or to nothing.
        """
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        if reference != "#" and not reference.startswith("#/"):
            raise UnsupportedSchemaError(f"$ref to an anchor: {reference!r}")
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
        if not isinstance(target, dict | bool):
            raise UnsupportedSchemaError(f"$ref to something that is not a schema: {reference!r}")
        return target
