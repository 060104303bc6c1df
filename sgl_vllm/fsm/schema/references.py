"""`$ref` within one document."""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema
from urllib.parse import unquote

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import Schema

_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
_OLDEST_DRAFTS = ("draft-03", "draft-04")


class References:
    """Resolves JSON pointers (RFC 6901) into one document.

    A pointer starts at the nearest subschema with its own `$id`, as the specification says.

    Args:
        root: the document.
        reads_ids: if not, every pointer starts at the document's root, as xgrammar reads it.

    Attributes:
        siblings_count: whether keywords beside `$ref` constrain values. Up to draft 7, which
            `$schema` has to name, they do not.
        has_resources: whether the document contains subschemas with an `$id`, so that equal
            references may point to different schemas.

    Raises UnsupportedSchemaError: the document is of draft 7 or earlier and uses `prefixItems`.
    """

    def __init__(self, root: Schema, *, reads_ids: bool = True) -> None:
        self._root = root
        dialect = root.get("$schema") if isinstance(root, dict) else None
        dialect = dialect if isinstance(dialect, str) and reads_ids else ""
        self.siblings_count = not any(draft in dialect for draft in _OLD_DRAFTS)
        self._id = "id" if any(draft in dialect for draft in _OLDEST_DRAFTS) else "$id"
        self._dialect = dialect
        self._resources: dict[int, dict[str, Any]] = {}
        """The enclosing subschema with an `$id`, for each dict (by id) that has one."""
        if reads_ids:
            self._find_resources()
        self.has_resources = bool(self._resources)

    def resolve(self, schema: dict[str, Any]) -> Schema:
        """The subschema that the `$ref` of `schema`, which is part of the document, points to.

        Raises UnsupportedSchemaError: it points to another document, to an anchor, or to nothing.
        """
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        if reference != "#" and not reference.startswith("#/"):
            raise UnsupportedSchemaError(f"$ref to an anchor: {reference!r}")
        target: Any = self._resources.get(id(schema), self._root)
        for part in reference[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
        if not isinstance(target, dict | bool):
            raise UnsupportedSchemaError(f"$ref to something that is not a schema: {reference!r}")
        return target

    def _find_resources(self) -> None:
        """One pass over the document. A dict with an `$id` that is data, as in `enum`, is taken for
        a subschema, which does no harm: no reference is resolved there."""
        stack: list[tuple[Any, dict[str, Any] | None]] = [(self._root, None)]
        while stack:
            node, resource = stack.pop()
            if isinstance(node, dict):
                if node is not self._root and self._is_resource(node):
                    resource = node
                    if node.get("$schema", self._dialect) != self._dialect:
                        raise UnsupportedSchemaError("a subschema of another draft")
                if resource is not None:
                    self._resources[id(node)] = resource
                if not self.siblings_count and isinstance(node.get("prefixItems"), list):
                    raise UnsupportedSchemaError("prefixItems, which this draft does not know")
            elif not isinstance(node, list):
                continue
            inner = node.values() if isinstance(node, dict) else node
            stack.extend([(item, resource) for item in inner if isinstance(item, dict | list)])

    def _is_resource(self, node: dict[str, Any]) -> bool:
        name = node.get(self._id)
        if not isinstance(name, str) or name.startswith("#") or not name:
            return False
        return self.siblings_count or "$ref" not in node
