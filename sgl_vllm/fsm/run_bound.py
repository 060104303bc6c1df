"""How much text a format can force at most in one run, estimated from its specification.

xgrammar reports a whole forced run in a microsecond, but without a limit: a recursive schema that
nothing satisfies forces text for ever, and nested repetitions force gigabytes. This module tells
which formats cannot. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any  # Any: parsed JSON

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "grammar"})
"""Keys under which a schema or a structural tag may refer to what contains it."""
_REPETITIONS = frozenset({"minItems", "minContains", "minProperties", "min"})
"""Keys under which a schema or a structural tag says how often something is repeated."""
_REPEATED = re.compile(r"\{(\d+)")


def of_json(spec: str) -> int | None:
    """The longest forced run of a JSON schema or a structural tag, in bytes.

    None if there may be no longest, because a part refers to another by name. Otherwise the length
    of the specification, times every repetition that it asks for.

    Raises:
        ValueError: it is not JSON, or a number in it is too long.
        RecursionError: it is nested too deeply.
    """
    document = json.loads(spec)
    factor = 1
    for key, value in _members(document):
        if key in _REFERENCES:
            return None
        if key in _REPETITIONS and isinstance(value, float):
            return None
        if key in _REPETITIONS and isinstance(value, int):
            factor *= max(1, value)
        elif key == "patternProperties" and isinstance(value, dict):
            factor *= prod(map(_repetitions, value))
        elif isinstance(value, str):
            factor *= _repetitions(value)
    return len(spec.encode(errors="surrogatepass")) * factor


def of_regex(pattern: str) -> int:
    """The longest forced run of a regular expression, in bytes.

    Raises:
        ValueError: a number in it is too long.
    """
    return len(pattern.encode(errors="surrogatepass")) * _repetitions(pattern)


def _repetitions(pattern: str) -> int:
    return prod(max(1, int(number)) for number in _REPEATED.findall(pattern))


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Every member of every object in parsed JSON."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
