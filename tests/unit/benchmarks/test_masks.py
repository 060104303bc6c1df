"""`benchmarks.masks`: real backends over made-up schemas, in the demo model's vocabulary."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("vllm")  # its backends are measured

from benchmarks import masks


@pytest.fixture(autouse=True)
def _loggers_and_environment_as_before(monkeypatch):
    """The command quiets vLLM's log for its process; other tests read it."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.slow
def test_the_command_measures_what_there_is_and_writes_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(masks.BACKENDS, "outlines", ("no.such", "Module", None))
    file = tmp_path / "masks.json"
    words = ["--tokenizer", "demo", "--backends", "xgrammar", "outlines", "sgl"]
    assert masks.main([*words, "--every", "14", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert "without outlines: No module named 'no'" in captured.err
    assert "mask, p50" in captured.out
    content = json.loads(file.read_text())
    assert content["backends"].keys() == {"xgrammar", "sgl"}
    for name, found in content["backends"].items():
        wrong = dict.fromkeys(("refused", "gave_up", "failed", "valid_refused"), 0)
        by_automata = 3 if name == "sgl" else 0
        right = {"tried": 3, "right": 3, "by_automata": by_automata, "invalid_accepted": 0}
        assert found["schemas"] == wrong | right
        assert found["instances"]["valid"] == 3 and found["instances"]["invalid"] == 9
        assert found["disagreements"] == 0
        assert found["compile_us"]["count"] == 3  # the set-up is not among them
        assert found["compile_again_us"]["count"] == 9
        assert 0 < found["accept_us"]["count"] <= found["mask_us"]["count"]
        assert [one["name"] for one in found["verdicts"]] == [f"generated_{n}" for n in (0, 14, 28)]
    assert content["versions"]["vllm"]
