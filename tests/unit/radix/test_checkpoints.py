"""Where a request on a model with recurrent layers stops to leave a checkpoint for others."""

from __future__ import annotations

import pytest

from sgl_vllm.radix.checkpoints import MIN_GAIN, stops_for


@pytest.mark.parametrize(
    ("branches", "num_hit", "stops"),
    [
        pytest.param([], 0, (), id="no other request shares anything"),
        pytest.param([0, 0], 0, (), id="others share no tokens"),
        pytest.param([100], 0, (100,), id="what was cached has no state at its end"),
        pytest.param([100], 100, (), id="it has one"),
        pytest.param([100], 100 - MIN_GAIN + 1, (), id="too little is computed again"),
        pytest.param([100, 100], 100 - MIN_GAIN // 2, (100,), id="twice as little, but by two"),
        pytest.param([260, 200, 260], 0, (200, 260), id="examples, then a question"),
        pytest.param([210, 200, 210], 0, (200,), id="a question that is too short"),
        pytest.param([210, 200, 210], 200, (), id="too short, and nothing before it"),
    ],
)
def test_a_checkpoint_is_left_where_it_saves_enough(branches, num_hit, stops):
    assert stops_for(branches, num_hit) == stops
