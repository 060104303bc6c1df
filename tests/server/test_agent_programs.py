"""`benchmarks.agent_programs` the whole way through, on a real server."""

from __future__ import annotations

import json

import pytest

from benchmarks.agent_programs import COMPILED, MARKED, ORDINARY, WAYS, main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_tools_that_are_called_early_save_their_time_and_nothing_is_computed_twice(tmp_path):
    assert main(["--quick", "--json", str(tmp_path / "result.json")]) == 0
    results = {one["program"]: one for one in json.loads((tmp_path / "result.json").read_text())}
    assert set(results) == {"research", "review", "repair"}
    for result in results.values():
        assert set(result["seconds"]) == set(WAYS)
        assert result["num_different"] == 0
        assert set(result["wasted_tokens"].values()) == {0}
    assert results["repair"]["prefilled_tokens"][MARKED] > 0
    # Three of its four tools, of 50 to 500 ms each, may run at the same time.
    seconds = results["repair"]["seconds"]
    assert max(seconds[MARKED], seconds[COMPILED]) < seconds[ORDINARY]
