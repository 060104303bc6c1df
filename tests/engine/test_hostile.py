"""`benchmarks.hostile`: a hostile tenant in the simulator, at the smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks import hostile, session_model, traces
from sgl_vllm.config import Options
from tools.engine_harness.settings import SGL

pytestmark = pytest.mark.timeout(300)


def test_the_command_compares_every_attack_on_both_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hostile.json"
    words = ["--requests", "30", "--sessions", "20", "--json", str(file)]
    assert hostile.main([*words, "--plugin-config", "schedule_hold_s=4"]) == 0
    found = json.loads(file.read_text())
    assert found.keys() == {"none", *hostile.Attacker(0, 1.0, 1, 1).attacks()}
    for arms in found.values():
        assert arms["stock"]["ttft_p99_s"] > 0 and arms["sgl"]["ttft_p99_s"] > 0
        assert arms["stock"]["num_bytes"] == 0 < arms["sgl"]["num_bytes"]
    assert "open sessions" in capsys.readouterr().out


def test_what_is_remembered_of_open_sessions_is_bounded() -> None:
    options = Options.from_mapping({"schedule_hold_s": 4, "why_evicted_mb": 1 / 64})
    agents = traces.with_span(session_model.trace(10, 0, hostile.SCALE), 5.0, 0)
    settings = hostile.settings_for(agents, 0.4, options)

    def num_bytes(num_sessions: int) -> int:
        attack = hostile.Attacker(0, 5.0, 1, num_sessions).attacks()["open sessions"]
        return hostile.run(agents, attack, SGL, settings).num_bytes

    assert num_bytes(4000) < 1.1 * num_bytes(2000)
