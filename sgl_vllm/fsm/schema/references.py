"""Places in a schema document: what `$ref` points to.

Owns `$id`, anchors, JSON pointers, and what `$schema` says. Does not own how a subschema is read
(`parse.py`).

Places are JSON pointers from the document's root: `#/properties/a~1b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple  # Any: JSON of a user's schema
from urllib.parse import unquote, urldefrag, urljoin

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, draft_of

_MAPS = frozenset(
    {
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("$defs", "definitions"),
    }
)
"""Keywords whose values hold subschemas by name."""

_SUBSCHEMAS = CONSTRAINTS - _MAPS - {"const", "enum", "type", "required"}
"""Keywords whose values may be a subschema, or a list of them."""

_NAMES = frozenset({"$schema", "id", "$id", "$anchor", "$dynamicAnchor"})


@dataclass(frozen=True, eq=False, slots=True)
class _Resource:
    """A schema with a URI of its own, from which the references in it start."""

    uri: str
    schema: Any
    place: str


class Subschema(NamedTuple):
    """A subschema of the document, before it is parsed."""

    schema: Any
    place: str


class References:
    """Resolves references within one document, whose names are found with the first reference.

    Attributes:
        draft: the draft that `$schema` names, or the newest: 4, 6, 7, 2019 or 2020.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._dialect = dialect if isinstance(dialect, str) else ""
        self.draft = draft_of(self._dialect)
        self._id = "id" if self.draft < 6 else "$id"
        self._resources: dict[str, _Resource] = {}  # by place
        self._by_uri: dict[str, _Resource] = {}
        self._anchors: dict[tuple[str, str], Subschema] = {}  # by the URI of the resource, and name
        self._dynamic: dict[str, int] = {}

    def check_draft(self, schema: dict[str, Any]) -> None:
        """Raises UnsupportedSchemaError if a subschema is of another draft than the document."""
        is_other = schema.get("$schema", self._dialect) != self._dialect
        if is_other and schema is not self._root and self._is_resource(schema):
            raise UnsupportedSchemaError("a subschema of another draft")

    def resolve(self, reference: Any, place: str, *, is_dynamic: bool = False) -> Subschema:
        """The subschema that a reference at a place points to.

        Raises UnsupportedSchemaError: it points to another document, or to nothing; or it is
            dynamic, and where it points to depends on where it was reached from.
        """
        if not isinstance(reference, str):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        if not self._resources:
            self._find_names()
        uri, _, fragment = reference.partition("#")
        resource = self._resource_of(place)
        if uri:
            found = self._by_uri.get(urldefrag(_joined(resource.uri, uri)).url)
            if found is None:
                raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
            resource = found
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return _pointed_to(resource, fragment, reference)
        target = self._anchors.get((resource.uri, fragment))
        if target is None:
            raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}")
        is_dynamic = is_dynamic and target.schema.get("$dynamicAnchor") == fragment
        if is_dynamic and self._dynamic[fragment] > 1:
            raise UnsupportedSchemaError("$dynamicRef with several targets")
        return target

    def _resource_of(self, place: str) -> _Resource:
        """The innermost resource that contains a place."""
        if len(self._resources) == 1:  # as in most documents
            return self._resources["#"]
        while place not in self._resources:
            place = place.rpartition("/")[0]
        return self._resources[place]

    def _find_names(self) -> None:
        """One pass over the subschemas of the document."""
        self._add_resource(_Resource("", self._root, "#"))
        if isinstance(self._root, dict) and isinstance(self._root.get(self._id), str):
            self._add_resource(self._named("", self._root, "#"))
        stack = [(self._root, "#", self._resources["#"])]
        while stack:
            node, place, resource = stack.pop()
            if isinstance(node, list):
                stack += [(one, f"{place}/{i}", resource) for i, one in enumerate(node)]
            if not isinstance(node, dict):
                continue
            if not _NAMES.isdisjoint(node):
                self.check_draft(node)
                if node is not self._root and self._is_resource(node):
                    resource = self._named(resource.uri, node, place)
                    self._add_resource(resource)
                self._find_anchors(Subschema(node, place), resource)
            for name, inner in node.items():
                if not isinstance(inner, dict | list):
                    continue
                at = f"{place}/{name}"
                if name in _SUBSCHEMAS:
                    stack.append((inner, at, resource))
                elif name in _MAPS and isinstance(inner, dict):
                    stack += [(one, f"{at}/{escaped(n)}", resource) for n, one in inner.items()]

    def _named(self, base: str, node: dict[str, Any], place: str) -> _Resource:
        return _Resource(urldefrag(_joined(base, node[self._id])).url, node, place)

    def _add_resource(self, resource: _Resource) -> None:
        self._resources[resource.place] = resource
        self._by_uri.setdefault(resource.uri, resource)

    def _find_anchors(self, target: Subschema, resource: _Resource) -> None:
        node = target.schema
        old = node.get(self._id)
        names = [node.get("$anchor"), dynamic := node.get("$dynamicAnchor")]
        if isinstance(old, str) and old.startswith("#") and self.draft <= 7:
            names.append(old[1:])
        for name in names:
            if isinstance(name, str):
                self._anchors.setdefault((resource.uri, name), target)
        if isinstance(dynamic, str):
            self._dynamic[dynamic] = self._dynamic.get(dynamic, 0) + 1

    def _is_resource(self, node: dict[str, Any]) -> bool:
        name = node.get(self._id)
        if not isinstance(name, str) or name.startswith("#") or not name:
            return False
        return self.draft > 7 or "$ref" not in node


def _pointed_to(resource: _Resource, pointer: str, reference: str) -> Subschema:
    target, place = resource.schema, resource.place
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(part)] if isinstance(target, list) else target[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
        place = f"{place}/{escaped(part)}"
    if not isinstance(target, dict | bool):
        raise UnsupportedSchemaError(f"$ref to something that is not a schema: {reference!r}")
    return Subschema(target, place)


def escaped(name: Any) -> str:
    """A name as a part of a JSON pointer."""
    text = str(name)
    return text.replace("~", "~0").replace("/", "~1") if "~" in text or "/" in text else text


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        raise UnsupportedSchemaError(f"not a URI: {reference!r}") from None
