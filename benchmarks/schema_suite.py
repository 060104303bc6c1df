"""The JSON-Schema-Test-Suite as schemas with instances, read from its archive.

Owns the layout of that archive. Pure. The suite is not part of this project: download a release of
github.com/json-schema-org/JSON-Schema-Test-Suite as `.tar.gz`.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.schemas import Instance, Schema

DRAFTS = ("draft7", "draft2020-12")
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def load_suite(archive: Path, drafts: tuple[str, ...] = DRAFTS) -> tuple[Schema, ...]:
    """The schemas of the suite's `tests/DRAFT/**.json`, optional ones included, each under the name
    `DRAFT/FILE: DESCRIPTION`. Those of draft 7 get the `$schema` that tells a validator so, unless
    they have one or are no objects.

    Raises ValueError if the archive cannot be read or holds no tests.
    """
    found: list[Schema] = []
    try:
        with tarfile.open(archive) as tar:
            for member in sorted(tar.getmembers(), key=lambda one: one.name):
                name = _name(member.name, drafts)
                file = tar.extractfile(member) if name is not None else None
                if file is not None:
                    found.extend(_group(name or "", group) for group in json.load(file))
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{archive}: {error!r}") from error
    if not found:
        raise ValueError(f"{archive}: no tests of {', '.join(drafts)} in it")
    return tuple(found)


def _name(path: str, drafts: tuple[str, ...]) -> str | None:
    """`draft7/optional/bignum` of `.../tests/draft7/optional/bignum.json`; None for other files."""
    parts = path.split("/")
    if "tests" not in parts or not path.endswith(".json"):
        return None
    below = parts[parts.index("tests") + 1 :]
    return "/".join(below).removesuffix(".json") if below[0] in drafts else None


def _group(name: str, group: Any) -> Schema:
    instances = tuple(Instance(_text(t["data"]), bool(t["valid"])) for t in group["tests"])
    schema = group["schema"]
    if isinstance(schema, dict) and name.startswith("draft7/"):
        schema = {"$schema": DRAFT_7, **schema}
    return Schema(f"{name}: {group['description']}", json.dumps(schema), instances)


def _text(value: Any) -> str:
    """JSON, with escapes only where it has halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
