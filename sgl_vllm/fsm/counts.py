"""Counts in formats, refused above a bound before anything is compiled.

Owns the bounds, and where a schema or a pattern counts. Pure: no vLLM, no compiler. Some compilers
allocate in proportion to a count: `{"type": "array", "minItems": 60000000}` made llguidance
allocate 5 GB.
"""

from __future__ import annotations

import math
import re
from typing import Any  # Any: a request's schema

MAX_ITEMS = 100_000
"""The largest `minItems`, `maxItems`, `minProperties`, ...; and the largest sum of them. llguidance
takes about 0.7 KB and 10 us for each counted item."""

MAX_REPETITIONS = 1_000_000
"""The largest sum of `{n,m}` in a pattern, where one repetition inside another multiplies."""

MAX_COUNTS = {
    **dict.fromkeys(
        ["minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"],
        MAX_ITEMS,
    ),
    "minLength": 1_000_000,
    "maxLength": (1 << 31) - 1,  # what schemas derived from Java or C say for "any length"
}
"""The largest value of each counting keyword. Lengths cost no memory, so they are not added up."""

_MAX_VISITED = 1_000_000
_MAX_REFERENCE_DEPTH = 100
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose value is data and not a schema."""

_MERGING = frozenset({"allOf", "anyOf", "oneOf"})


class CountLimitError(ValueError):
    """A format counts too far. The message names the keyword, its value and the bound."""


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema, or any JSON that contains schemas, that counts too far.

    A `$ref` whose target a compiler has to merge with other keywords counts as much as its target.
    Cost: about a microsecond for each value in the document.

    Raises:
        CountLimitError: a count, the sum of the counts, or a repetition in a pattern is too large.
    """
    total = _Totals(schema).of(schema, 0)
    if total > MAX_ITEMS:
        raise CountLimitError(
            f"minItems, maxItems, minProperties and maxProperties of the schema add up to "
            f"{total:,}; at most {MAX_ITEMS:,} is allowed: lower them, or leave out those that "
            "need not be enforced"
        )


def check_pattern(pattern: str, title: str = "pattern") -> None:
    """Refuse a pattern, or a grammar, that repeats too often: `a{1000000000}`, `(a{10000}){10000}`.

    Cost: one pass over the text.

    Args:
        title: what it is, for messages.

    Raises:
        CountLimitError: the repetitions are too many.
    """
    if "{" not in pattern:
        return
    total, largest = _repetitions(pattern)
    if total > MAX_REPETITIONS:
        raise CountLimitError(
            f"{largest} in the {title} makes {_shown(total)} repetitions; "
            f"at most {MAX_REPETITIONS:,} are allowed"
        )


class _Totals:
    """The sums of the counts of one document. Checks each count and each pattern on the way."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._of_target: dict[str, int] = {}
        self._num_visited = 0

    def of(self, node: Any, depth: int) -> int:
        """The sum of the counts in `node`, and in the targets of references that are merged."""
        if depth > _MAX_REFERENCE_DEPTH:
            raise CountLimitError(
                f"the schema merges references {_MAX_REFERENCE_DEPTH} deep; use fewer"
            )
        total = 0
        stack: list[tuple[Any, bool]] = [(node, False)]
        while stack:
            value, is_merged = stack.pop()
            self._num_visited += 1
            if isinstance(value, list):
                stack.extend([(item, is_merged) for item in value])
            if not isinstance(value, dict):
                continue
            reference = value.get("$ref")
            if isinstance(reference, str) and (is_merged or len(value) > 1):
                total += self._of_reference(reference, depth)
            for name, inner in value.items():
                if isinstance(inner, dict | list):
                    if name not in _VALUES:
                        stack.append((inner, name in _MERGING))
                elif name in MAX_COUNTS:
                    count = _checked(name, inner)
                    total += count if MAX_COUNTS[name] == MAX_ITEMS else 0
                elif name == "pattern" and isinstance(inner, str):
                    check_pattern(inner)
            if isinstance(value.get("patternProperties"), dict):
                for pattern in value["patternProperties"]:
                    check_pattern(pattern)
        return total

    def _of_reference(self, reference: str, depth: int) -> int:
        known = self._of_target.get(reference)
        if known is None:
            if self._num_visited > _MAX_VISITED:
                raise CountLimitError(
                    "the schema merges too many references to large subschemas; use fewer"
                )
            self._of_target[reference] = 0  # inside itself
            target = _target(self._root, reference)
            known = self._of_target[reference] = self.of(target, depth + 1)
        return known


def _target(root: Any, reference: str) -> Any:
    """What a JSON pointer points to; None if it is to something else."""
    if not reference.startswith("#"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            node = node[int(part)] if isinstance(node, list) else node[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return node


def _checked(keyword: str, value: Any) -> int:
    """A count as a number, rounded down; 0 for what is not a number, which others refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return 0
    bound = MAX_COUNTS[keyword]
    if value > bound:
        advice = ": leave it out if any number is allowed" if keyword.startswith("max") else ""
        raise CountLimitError(f"{keyword} is {_shown(value)}; at most {bound:,} is allowed{advice}")
    return max(0, int(value))


def _shown(value: float) -> str:
    if isinstance(value, int) and value < 10**15:
        return f"{value:,}"
    try:
        return f"{float(value):.3g}"
    except OverflowError:
        return f"a number of {int(math.log10(value)) + 1:,} digits"


_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.?|[^\]\\])*(?:\]|\Z)|\((?:\?(?:[:=!>]|<[=!]|P?<\w+>))?|\)"
    r"|\{(?P<low>\d+)(?:,(?P<high>\d*))?\}|.",
    re.DOTALL,
)


def _repetitions(pattern: str) -> tuple[int, str]:
    """The sum of the repetitions, those inside others multiplied; and the largest quantifier."""
    groups: list[int] = []
    total = last = 0
    """`last`: the repetitions of the last atom, which a quantifier multiplies."""
    largest, worst = "", -1
    for match in _TOKEN.finditer(pattern):
        token, low, high = match[0], match["low"], match["high"]
        if low:
            # No count of so many digits is allowed, and int() is slow and limited for long ones.
            count = max(int(low[:20]), int((high or "0")[:20]))
            repeated = max(1, last) * count
            total += repeated - last
            last = repeated
            if count > worst:
                largest, worst = token if len(token) <= 40 else f"{token[:40]}...", count
        elif token.startswith("("):
            groups.append(total)
            total = last = 0
        elif token == ")" and groups:
            last = total
            total += groups.pop()
        else:
            last = 0
    return total + sum(groups), largest
