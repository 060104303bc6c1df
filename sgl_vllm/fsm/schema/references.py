"""Places in a schema document: what `$ref` points to.

Owns `$id`, anchors, JSON pointers, and what `$schema` says. Does not own how a subschema is read
(`parse.py`).

Places are JSON pointers from the document's root: `#/properties/a~1b`.
"""

from __future__ import annotations

import re
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

_ESCAPED_LETTER = re.compile(r"\\u00[2467]")
"""Characters of keywords in a spelling that JSON does not need."""

_SUBSCHEMAS = CONSTRAINTS - _MAPS - {"const", "enum"}
"""Keywords whose values may be a subschema, or a list of them."""


@dataclass(frozen=True, eq=False, slots=True)
class Resource:
    """A schema with a URI of its own, from which the references in it start."""

    uri: str
    schema: Any
    place: str


class Subschema(NamedTuple):
    """A subschema of the document, before it is parsed."""

    schema: Any
    place: str
    resource: Resource


class References:
    """Resolves references within one document.

    Args:
        root: the document.
        text: the document as JSON.

    Attributes:
        draft: the draft that `$schema` names, or the newest: 4, 6, 7, 2019 or 2020.
        document: the resource of the root.
        resources: the other resources, by their places.
    """

    def __init__(self, root: Any, text: str) -> None:
        self._root = root
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._dialect = dialect if isinstance(dialect, str) else ""
        self.draft = draft_of(self._dialect)
        self._id = "id" if self.draft < 6 else "$id"
        self.document = Resource("", root, "#")
        self.resources: dict[str, Resource] = {}
        self._by_uri: dict[str, Resource] = {"": self.document}
        self._anchors: dict[tuple[str, str], Subschema] = {}
        self._dynamic: dict[str, int] = {}
        if isinstance(root, dict) and isinstance(root.get(self._id), str):
            self.document = self._resource(root, "", "#")
        if self._has_names(text):
            self._find_names()

    def resolve(self, reference: Any, resource: Resource, *, is_dynamic: bool = False) -> Subschema:
        """The subschema that a reference in `resource` points to.

        Raises UnsupportedSchemaError: it points to another document, or to nothing; or it is
            dynamic, and where it points to depends on where it was reached from.
        """
        if not isinstance(reference, str):
            raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
        uri, _, fragment = reference.partition("#")
        if uri:
            found = self._by_uri.get(urldefrag(_joined(resource.uri, uri)).url)
            if found is None:
                raise UnsupportedSchemaError(f"$ref to another document: {reference!r}")
            resource = found
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointed_to(resource, fragment, reference)
        target = self._anchors.get((resource.uri, fragment))
        if target is None:
            raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}")
        is_dynamic = is_dynamic and target.schema.get("$dynamicAnchor") == fragment
        if is_dynamic and self._dynamic[fragment] > 1:
            raise UnsupportedSchemaError("$dynamicRef with several targets")
        return target

    def _pointed_to(self, resource: Resource, pointer: str, reference: str) -> Subschema:
        target, place = resource.schema, resource.place
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedSchemaError(f"$ref to nothing: {reference!r}") from None
            place = f"{place}/{escaped(part)}"
            resource = self.resources.get(place, resource)
        if not isinstance(target, dict | bool):
            raise UnsupportedSchemaError(f"$ref to something that is not a schema: {reference!r}")
        return Subschema(target, place, resource)

    def _has_names(self, text: str) -> bool:
        """Whether a part of the document, other than its root, may have an `$id` or an anchor. Most
        have none, and a search in the text takes a hundredth of the time of a pass over them."""
        if _ESCAPED_LETTER.search(text):
            return True
        own = self._root.get(self._id) if isinstance(self._root, dict) else None
        is_named = isinstance(own, str) and not own.startswith("#")
        names = (self._id, "$anchor", "$dynamicAnchor")
        return sum([text.count(f'"{name}"') for name in names]) > is_named

    def _find_names(self) -> None:
        """One pass over the subschemas of the document."""
        stack: list[tuple[Any, str, Resource]] = [(self._root, "#", self.document)]
        while stack:
            node, place, resource = stack.pop()
            if isinstance(node, list):
                stack += [(one, f"{place}/{i}", resource) for i, one in enumerate(node)]
            if not isinstance(node, dict):
                continue
            if node is not self._root and self._is_resource(node):
                if node.get("$schema", self._dialect) != self._dialect:
                    raise UnsupportedSchemaError("a subschema of another draft")
                resource = self.resources[place] = self._resource(node, resource.uri, place)
            self._find_anchors(Subschema(node, place, resource))
            for name, inner in node.items():
                at = f"{place}/{escaped(name)}"
                if name in _MAPS and isinstance(inner, dict):
                    stack += [(one, f"{at}/{escaped(n)}", resource) for n, one in inner.items()]
                elif name in _SUBSCHEMAS:
                    stack.append((inner, at, resource))

    def _resource(self, node: dict[str, Any], base: str, place: str) -> Resource:
        resource = Resource(urldefrag(_joined(base, node[self._id])).url, node, place)
        self._by_uri.setdefault(resource.uri, resource)
        return resource

    def _find_anchors(self, target: Subschema) -> None:
        node = target.schema
        old = node.get(self._id)
        names = [node.get("$anchor"), dynamic := node.get("$dynamicAnchor")]
        if isinstance(old, str) and old.startswith("#") and self.draft <= 7:
            names.append(old[1:])
        for name in names:
            if isinstance(name, str):
                self._anchors.setdefault((target.resource.uri, name), target)
        if isinstance(dynamic, str):
            self._dynamic[dynamic] = self._dynamic.get(dynamic, 0) + 1

    def _is_resource(self, node: dict[str, Any]) -> bool:
        name = node.get(self._id)
        if not isinstance(name, str) or name.startswith("#") or not name:
            return False
        return self.draft > 7 or "$ref" not in node


def escaped(name: Any) -> str:
    """A name as a part of a JSON pointer."""
    text = str(name)
    return text.replace("~", "~0").replace("/", "~1") if "~" in text or "/" in text else text


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        raise UnsupportedSchemaError(f"not a URI: {reference!r}") from None
