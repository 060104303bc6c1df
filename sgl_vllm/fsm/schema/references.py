"""`$ref` within one document."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any  # Any: JSON of a user's schema
from urllib.parse import unquote, urldefrag, urljoin

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Schema

DRAFTS = {
    "draft-03": 3,
    "draft-04": 4,
    "draft-06": 6,
    "draft-07": 7,
    "2019-09": 2019,
    "2020-12": 2020,
}
_NEWEST = 2020
_SINCE = {
    6: frozenset({"const", "contains", "propertyNames"}),
    7: frozenset({"if", "then", "else"}),
    2019: frozenset(
        {
            *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
            *("minContains", "maxContains"),
        }
    ),
    2020: frozenset({"prefixItems"}),
}
"""The drafts that brought keywords."""

_UNKNOWN = {
    draft: frozenset({"dependencies"} if draft > 7 else ()).union(
        *[names for since, names in _SINCE.items() if since > draft]
    )
    for draft in DRAFTS.values()
}

_MAPS = frozenset(
    {
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("$defs", "definitions"),
    }
)
"""Keywords whose values hold subschemas by name."""


_NAMES = ("$anchor", "$dynamicAnchor", "prefixItems")
"""Keywords that are looked for, besides `$id`."""

_ESCAPED_LETTER = re.compile(r"\\u00[2467]")
"""Characters of these names in a spelling that JSON does not need."""

_SCHEMA, _MAP, _OTHER = range(3)
"""What a part of the document is: a schema or a list of them, schemas by name, or neither. Numbers,
because an enumeration's hash is computed in Python."""

_INSIDE = {
    **dict.fromkeys(CONSTRAINTS - {"const", "enum"}, _SCHEMA),
    **dict.fromkeys(_MAPS, _MAP),
}
"""The kind of a keyword's value; all others are neither."""


class References:
    """Resolves `$ref` within one document, by its subschemas' `$id`s, anchors and JSON pointers.

    Args:
        root: the document.
        text: the document as JSON.

    Attributes:
        siblings_count: whether keywords beside `$ref` constrain values. Up to draft 7, which
            `$schema` has to name, they do not.
        contains_evaluates: whether `unevaluatedItems` leaves out what `contains` finds.
        whole_is_integer: whether 1.0 is an integer, as from draft 6 on.
        unknown: keywords that constrain values in other drafts only.
        has_resources: whether the document contains subschemas with an `$id`, so that equal
            references may point to different schemas.

    Raises UnsupportedSchemaError: the document is of draft 7 or earlier and uses `prefixItems`.
    """

    def __init__(self, root: Schema, text: str) -> None:
        self._root = root
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._dialect = dialect if isinstance(dialect, str) else ""
        draft = next((n for name, n in DRAFTS.items() if name in self._dialect), _NEWEST)
        self.siblings_count = draft > 7
        self.contains_evaluates = draft >= 2020
        self.whole_is_integer = draft >= 6
        self.unknown = _UNKNOWN[draft]
        self._id = "id" if draft < 6 else "$id"
        self._resources: dict[int, _Resource] = {}
        """The enclosing resource of each dict (by id); only if there are several."""
        self._document = _Resource("", root)
        self._by_uri: dict[str, _Resource] = {"": self._document}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._dynamic: dict[str, list[Schema]] = {}
        self._resolved: dict[tuple[_Resource, str], Schema] = {}
        self._find_resources(text)
        self.has_resources = bool(self._resources)

    def targets(self, schema: dict[str, Any]) -> list[Schema]:
        """The subschemas that `schema` refers to.

        Raises UnsupportedSchemaError: as `resolve`; or it depends on where the reference was
            reached from.
        """
        found = [self.resolve(schema)] if "$ref" in schema else []
        if "$dynamicRef" in schema:
            found.append(self._dynamic_target(schema))
        if "$recursiveRef" in schema:
            raise UnsupportedSchemaError("$recursiveRef is not supported")
        return found

    def resolve(self, schema: dict[str, Any], keyword: str = "$ref") -> Schema:
        """The subschema that a reference of `schema`, which is part of the document, points to.

        Raises UnsupportedSchemaError: it points to another document, or to nothing.
        """
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        resource = self._resources.get(id(schema), self._document)
        known = self._resolved.get((resource, reference))
        if known is None:
            known = self._resolved[resource, reference] = self._resolve(resource, reference)
        return known

    def _resolve(self, resource: _Resource, reference: str) -> Schema:
        uri, _, fragment = reference.partition("#")
        if uri:
            found = self._by_uri.get(urldefrag(_joined(resource.uri, uri)).url)
            if found is None:
                raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
            resource = found
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((resource.uri, fragment))
            if target is None:
                raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}")
            return target
        return _pointed_to(resource.schema, fragment, reference)

    def _dynamic_target(self, schema: dict[str, Any]) -> Schema:
        """What `$dynamicRef` points to, if only one subschema can be meant."""
        target = self.resolve(schema, "$dynamicRef")
        anchor = schema["$dynamicRef"].partition("#")[2]
        is_dynamic = isinstance(target, dict) and target.get("$dynamicAnchor") == anchor
        if is_dynamic and len(self._dynamic.get(anchor, ())) > 1:
            raise UnsupportedSchemaError("$dynamicRef with several targets")
        return target

    def _find_resources(self, text: str) -> None:
        """One pass over the subschemas of the document, if it is not known to have no others."""
        if isinstance(self._root, dict) and isinstance(self._root.get(self._id), str):
            self._document = self._resource(self._root, "")
        names = frozenset({self._id, *_NAMES})
        if not self._may_have(names, text):
            return
        stack: list[tuple[Any, _Resource, int]] = [(self._root, self._document, _SCHEMA)]
        while stack:
            node, resource, kind = stack.pop()
            if isinstance(node, list):
                stack.extend([(item, resource, kind) for item in node])
            if not isinstance(node, dict):
                continue
            if kind == _SCHEMA and not names.isdisjoint(node):
                if node is not self._root and self._is_resource(node):
                    if node.get("$schema", self._dialect) != self._dialect:
                        raise UnsupportedSchemaError("a subschema of another draft")
                    resource = self._resource(node, resource.uri)
                self._find_anchors(node, resource)
                if "prefixItems" in self.unknown and isinstance(node.get("prefixItems"), list):
                    raise UnsupportedSchemaError("prefixItems, which this draft does not know")
            if resource is not self._document:
                self._resources[id(node)] = resource
            for name, inner in node.items():
                if isinstance(inner, (dict, list)):  # `dict | list` would be built on every call
                    if kind == _SCHEMA:
                        inside = _INSIDE.get(name, _OTHER)
                    else:
                        inside = _SCHEMA if kind == _MAP else _OTHER
                    if inside != _OTHER or resource is not self._document:
                        stack.append((inner, resource, inside))

    def _may_have(self, names: Iterable[str], text: str) -> bool:
        """Whether a dict in the document, other than its root, may have one of some keys. Most have
        none, and a search in the text takes a hundredth of the time of the pass."""
        if _ESCAPED_LETTER.search(text):
            return True
        own = self._root.get(self._id) if isinstance(self._root, dict) else None
        is_named = isinstance(own, str) and not own.startswith("#")
        return sum([text.count(f'"{name}"') for name in names]) > is_named

    def _resource(self, node: dict[str, Any], base: str) -> _Resource:
        resource = _Resource(urldefrag(_joined(base, node[self._id])).url, node)
        self._by_uri.setdefault(resource.uri, resource)
        return resource

    def _find_anchors(self, node: dict[str, Any], resource: _Resource) -> None:
        names = [node.get("$anchor"), node.get("$dynamicAnchor")]
        old = node.get(self._id)
        if isinstance(old, str) and old.startswith("#") and not self.siblings_count:
            names.append(old[1:])
        for name in names:
            if isinstance(name, str):
                self._anchors.setdefault((resource.uri, name), node)
        if isinstance(names[1], str):
            self._dynamic.setdefault(names[1], []).append(node)

    def _is_resource(self, node: dict[str, Any]) -> bool:
        name = node.get(self._id)
        if not isinstance(name, str) or name.startswith("#") or not name:
            return False
        return self.siblings_count or "$ref" not in node


@dataclass(frozen=True, eq=False)
class _Resource:
    """A schema with a URI of its own, from which the references in it start."""

    uri: str
    schema: Schema


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        raise UnsupportedSchemaError(f"not a URI: {reference!r}") from None


def _pointed_to(root: Schema, pointer: str, reference: str) -> Schema:
    target: Any = root
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(part)] if isinstance(target, list) else target[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
    if not isinstance(target, dict | bool):
        raise UnsupportedSchemaError(f"$ref to something that is not a schema: {reference!r}")
    return target
