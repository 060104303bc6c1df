"""What one compilation may cost.

Owns the budgets of work, depth and time, and the automata that one compilation combines. Does not
own what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import thread_time

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.errors import (
    TooComplexError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
from sgl_vllm.fsm.nfa import dfa_of
from sgl_vllm.fsm.regex import json_string_search
from sgl_vllm.fsm.syntax import Choice, Text

MAX_WORK = 400_000
"""Keywords, members, values and intersections: intersections of alternatives multiply."""

_COMBINING = 100
"""The work of combining two automata, in the unit of `MAX_WORK`."""

MAX_DEPTH = 200
MAX_S = 5.0
"""Of the thread's processor time, for what is not counted as work: automata."""

MAX_TABLE_BYTES = 64 << 20
"""What the tables of all automata take together."""


class Workspace:
    """The budgets of one compilation.

    Attributes:
        table_bytes: what the tables of its automata take.
        depth: of the current subschema.
    """

    def __init__(self) -> None:
        self.table_bytes = 0
        self.depth = 0
        self._work = 0
        self._until_s = thread_time() + MAX_S
        self._counted: set[ByteDfa] = set()
        self._combined: dict[tuple[ByteDfa, ByteDfa, bool], ByteDfa] = {}
        self._texts: dict[tuple[bytes, ...], ByteDfa] = {}

    def spend(self, amount: int) -> None:
        """Raises UnsupportedSchemaError beyond `MAX_WORK`."""
        self._work += amount
        if self._work > MAX_WORK:
            raise UnsupportedSchemaError("the schema and its conjunctions are too large")

    def inside(self, place: str | None) -> _Inside:
        """A context for the work on a subschema that is inside the current one.

        Raises UnsupportedSchemaError: it is nested too deeply; or there is an error below, which
            gets the innermost place that is known.
        """
        return _Inside(self, place)

    def common(self, a: ByteDfa, b: ByteDfa, *, minus: bool = False) -> ByteDfa:
        """As `combined`; the same automaton for the same two."""
        key = a, b, minus
        known = self._combined.get(key)
        if known is None:
            self.spend(_COMBINING)
            known = self._combined[key] = self._made(combined(a, b, minus=minus))
        return known

    def texts(self, texts: Iterable[bytes]) -> ByteDfa:
        """The automaton of some texts; the same one for the same texts."""
        key = tuple(sorted({*texts}))
        known = self._texts.get(key)
        if known is None:
            self.spend(len(key))
            known = self._texts[key] = self._made(dfa_of(Choice(tuple(map(Text, key)))))
        return known

    def pattern(self, pattern: str) -> ByteDfa:
        """The automaton of a JSON string in which `pattern` is found."""
        return self._made(json_string_search(pattern))

    def _made(self, dfa: ByteDfa) -> ByteDfa:
        if dfa not in self._counted:
            self._counted.add(dfa)
            self.table_bytes += dfa.table_bytes
        if self.table_bytes > MAX_TABLE_BYTES or thread_time() > self._until_s:
            raise UnsupportedSchemaError(
                f"the automata of the schema take more than {MAX_S:g} s or "
                f"{MAX_TABLE_BYTES >> 20} MiB"
            )
        return dfa


class _Inside:
    """What `Workspace.inside` returns. `contextmanager` takes three times as long."""

    def __init__(self, workspace: Workspace, place: str | None) -> None:
        self._workspace = workspace
        self._place = place

    def __enter__(self) -> None:
        if self._workspace.depth == MAX_DEPTH:
            raise UnsupportedSchemaError("the schema is nested too deeply")
        self._workspace.depth += 1

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._workspace.depth -= 1
        if isinstance(error, UnsupportedPatternError | TooComplexError):
            placed = UnsupportedSchemaError(str(error))
            placed.place = self._place
            raise placed from None
        if isinstance(error, UnsupportedSchemaError):
            error.place = error.place or self._place
