"""`benchmarks.agent_programs` the whole way through, on a real server."""

from __future__ import annotations

import json

import pytest

from benchmarks.agent_programs import COMPILED, MARKED, ORDINARY, WAYS, main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


NUM_RUNS = 2
"""Of each program in each way, with `--quick`."""

BLOCK_SIZE = 32
"""A request that arrives while the last block of its prefix is being computed does not find that
block: less than this many tokens are computed twice, in each run."""


def test_tools_that_are_called_early_save_their_time_and_at_most_a_block_is_computed_twice(
    tmp_path,
):
    assert main(["--quick", "--json", str(tmp_path / "result.json")]) == 0
    results = {one["program"]: one for one in json.loads((tmp_path / "result.json").read_text())}
    assert set(results) == {"research", "review", "repair"}
    for result in results.values():
        assert set(result["seconds"]) == set(WAYS)
        assert result["num_different"] == 0
        assert max(result["wasted_tokens"].values()) < NUM_RUNS * BLOCK_SIZE
    assert results["repair"]["prefilled_tokens"][MARKED] > 0
    # Three of its four tools, of 50 to 500 ms each, may run at the same time.
    seconds = results["repair"]["seconds"]
    assert max(seconds[MARKED], seconds[COMPILED]) < seconds[ORDINARY]
