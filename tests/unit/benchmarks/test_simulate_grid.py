"""`benchmarks.simulate_grid`: its processes. What they run is tested with the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import traces
from benchmarks.cost_model import CostModel
from benchmarks.simulate_grid import Run, run_all
from tools.engine_harness.settings import EngineSettings


def test_a_run_that_fails_in_another_process_fails_here() -> None:
    not_a_number: Any = "soon"
    settings = EngineSettings(num_blocks=2, block_size=16, max_model_len=100)
    run = Run("stock", settings, CostModel(), span_s=not_a_number)  # fails before it needs vLLM
    with pytest.raises(TypeError):
        run_all(traces.generate("react", 5), [run, dataclasses.replace(run, seed=1)], 2, print)
