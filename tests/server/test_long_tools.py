"""`benchmarks.long_tools` the whole way through, on a real server."""

from __future__ import annotations

import json

import pytest

from benchmarks.long_tools import ONCE, QUICK, TWICE, main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_prompt_that_is_sent_again_before_the_tool_returns_is_not_computed_after_it(tmp_path):
    assert main(["--quick", "--json", str(tmp_path / "result.json")]) == 0
    results = {one["way"]: one for one in json.loads((tmp_path / "result.json").read_text())}
    (once,), (twice,) = (results[way]["computed"] for way in (ONCE, TWICE))
    assert once > QUICK.guide, "the other clients did not evict the prompt"
    assert twice < QUICK.guide / 4
