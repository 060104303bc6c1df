"""The workloads of `benchmarks.ab`: what is asked, of what size, and what is right."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")


from benchmarks.ab.workloads import WORKLOADS
from benchmarks.ab.workloads.base import Texts, Vocabulary


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_as_many_items_as_asked_for_and_the_same_from_the_same_seed(
    name: str, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    made = workload.items(Texts(vocabulary, 0), 6)
    assert len(made) == 6
    assert (
        made == workload.items(Texts(vocabulary, 0), 6) != workload.items(Texts(vocabulary, 1), 6)
    )
    assert workload.name == name and workload.quick_requests < workload.num_requests
    assert {*workload.program.arg_names} == {*made[0]}
