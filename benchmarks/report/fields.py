"""A JSON file of unknown age, read field by field: what is missing or null is None or empty, and
what is of the wrong kind is an error that says where."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ReportError(ValueError):
    """The report cannot be made; the message is one line for people."""


def content_of(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:  # no JSON, or no text
        raise ReportError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{file} is no result of benchmarks.ab: its JSON is no object")
    return content


@dataclass(frozen=True)
class Fields:
    """An object of a file's JSON; errors say where it is. What is missing or null is None."""

    content: Mapping[str, Any]
    where: str

    def _get(self, key: str, kinds: type | tuple[type, ...], wanted: str) -> Any:
        value = self.content.get(key)
        is_wrong_bool = isinstance(value, bool) and kinds is not bool
        if value is not None and (is_wrong_bool or not isinstance(value, kinds)):
            raise ReportError(f"{self.where}: {key} is no {wanted}")
        return value

    def number(self, key: str) -> float | None:
        """Finite ones only."""
        value = self._get(key, (int, float), "number")
        return value if value is not None and math.isfinite(value) else None

    def count(self, key: str) -> int:
        """0 if there is none."""
        return int(self.number(key) or 0)

    def text(self, key: str) -> str:
        return self._get(key, str, "text") or ""

    def truth(self, key: str) -> bool | None:
        return self._get(key, bool, "truth value")

    def fields(self, key: str) -> Fields:
        return Fields(self._get(key, dict, "object") or {}, f"{self.where}: {key}")

    def list_of_fields(self, key: str) -> list[Fields]:
        found = self._get(key, list, "list") or []
        if not all(isinstance(one, dict) for one in found):
            raise ReportError(f"{self.where}: {key} is no list of objects")
        return [Fields(one, f"{self.where}: {key}[{i}]") for i, one in enumerate(found)]

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(str(one) for one in self._get(key, list, "list") or [])

    def numbers(self) -> dict[str, float]:
        """All that are finite numbers, by their names."""
        return {
            key: value
            for key, value in self.content.items()
            if type(value) in (int, float) and math.isfinite(value)
        }

    def strings(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.content.items() if value is not None}
