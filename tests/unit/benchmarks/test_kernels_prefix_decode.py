"""The cases of the prefix-grouped decode benchmark share what their names say."""

from __future__ import annotations

from benchmarks.kernels.prefix_decode import Case, distinct_tokens, tables_of

TWO_LEVELS = Case(12, ((64, 1), (40, 3)), own_tokens=30)


def test_distinct_tokens_are_counted_once() -> None:
    table, lengths = tables_of(TWO_LEVELS)
    # Of 40 tokens, 32 are whole blocks.
    assert distinct_tokens(table, lengths, 16) == 64 + 3 * 32 + 12 * (8 + 30)
