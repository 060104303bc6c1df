"""The cases of the prefix-grouped decode benchmark share what their names say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernels.prefix_decode import CASES, Case, distinct_tokens, tables_of

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


def test_blocks_that_are_not_a_power_of_two() -> None:
    case = replace(TWO_LEVELS, block_size=48)
    assert distinct_tokens(*tables_of(case), 48) == 48 + 12 * (134 - 48)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_cases_are_of_their_kind(case: Case) -> None:
    small = case.small()
    assert small.num_heads // small.num_kv_heads == case.num_heads // case.num_kv_heads
    assert len(small.levels) == len(case.levels)
    assert small.num_requests <= case.num_requests
    assert tables_of(small)[1].max() < 300


def test_no_two_cases_have_one_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
