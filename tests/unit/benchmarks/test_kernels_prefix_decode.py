"""The cases of the prefix-grouped decode benchmark share what their names say."""

from __future__ import annotations

import numpy as np

from benchmarks.kernels.prefix_decode import Case, distinct_tokens, tables_of

TWO_LEVELS = Case(12, ((64, 1), (40, 3)), own_tokens=30)


def test_requests_share_the_blocks_of_their_groups_alone() -> None:
    table, lengths = tables_of(TWO_LEVELS)
    assert set(lengths) == {134}
    same = (table[:, None] == table[None]).cumprod(axis=2).sum(axis=2)
    np.fill_diagonal(same, 0)
    assert sorted(set(same.ravel())) == [0, 4, 6]  # 0 is the diagonal's
    assert ((same == 6).sum(axis=1) == 3).all()


def test_distinct_tokens_are_counted_once() -> None:
    table, lengths = tables_of(TWO_LEVELS)
    # Of 40 tokens, 32 are whole blocks.
    assert distinct_tokens(table, lengths, 16) == 64 + 3 * 32 + 12 * (8 + 30)
