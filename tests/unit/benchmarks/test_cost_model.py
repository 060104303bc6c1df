"""`benchmarks.cost_model`: the fit finds what passes cost, and the file is read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost_model import Batch, CostModel, Pass, fit

H100 = CostModel()


def batches(num_batches: int, seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        Batch(
            prefill=int(rng.integers(0, 2)) * int(rng.integers(1, 8192)),
            decode=int(rng.integers(1, 256)),
            context=int(rng.integers(0, 500_000)),
        )
        for _ in range(num_batches)
    ]


def test_a_batch_counts_requests_with_one_token_as_decoding() -> None:
    assert Batch.of([(0, 512), (100, 1), (200, 1), (1000, 24)]) == Batch(
        prefill=536, decode=2, context=1300
    )


def test_exact_passes_give_their_own_coefficients() -> None:
    found = fit([Pass(batch, H100.batch_s(batch)) for batch in batches(50)])
    for name, value in dataclasses.asdict(H100).items():
        assert getattr(found.cost, name) == pytest.approx(value, rel=1e-6)
    assert found.relative_error_p90 < 1e-9
    assert found.r_squared == pytest.approx(1)


def test_no_coefficient_is_negative_where_plain_least_squares_has_one() -> None:
    """A machine on which more context makes a pass shorter, for whatever reason."""
    cost = fit(
        [
            Pass(batch, 10e-3 + 32e-6 * batch.prefill + 15e-6 * batch.decode - 1e-8 * batch.context)
            for batch in batches(50)
        ]
    ).cost
    assert cost.context_token_s == 0
    assert min(dataclasses.astuple(cost)) >= 0


def test_batches_that_are_all_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="too much alike"):
        fit([Pass(Batch(0, size, 100 * size), 1e-3 * size) for size in range(1, 20)])


def test_a_file_gives_the_cost_model_that_was_written(tmp_path: Path) -> None:
    cost = CostModel(1e-3, 2e-6, 3e-6, 4e-9)
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"cost_model": dataclasses.asdict(cost), "device": "any"}))
    assert CostModel.from_json(file) == cost


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"cost_model": {"step_s": 1}}', '{"cost_model": null}']
    + [
        json.dumps({"cost_model": {**dataclasses.asdict(H100), "step_s": value}})
        for value in (-1, "x", None, float("nan"))
    ],
)
def test_a_file_that_holds_no_cost_model_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        CostModel.from_json(file)
