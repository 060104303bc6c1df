"""`sgl-vllm verify`: its arguments, and what it does about a check that cannot start."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest

from sgl_vllm.commands.cli import main
from sgl_vllm.self_check import offline


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what follows is for a hub that is imported already
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such-model"], "not run: no/such-model is "),
        (["m", "--dtype", "half", "--output", "/proc/no"], "/proc/no cannot be opened"),
        (["--outptu", ".", "m"], "write MODEL before --outptu; did you mean --output?"),
    ],
)
def test_what_cannot_run_is_said_in_one_line_and_nothing_is_written(folder, capsys, words, said):
    assert main(["verify", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"sgl-vllm verify: {said}")
    assert not list(folder.iterdir())


def test_an_engine_that_dies_is_reported(folder, capsys, monkeypatch):
    def verify(*arguments):
        raise MemoryError("no GPU memory")

    monkeypatch.setattr(offline, "verify", verify)
    assert main(["verify", "m"]) == 1
    report = json.loads((folder / "sgl-vllm-verify.json").read_text())
    assert report["error"] == "MemoryError: no GPU memory"
    shown = capsys.readouterr().out
    assert shown.startswith("sgl-vllm self-check: did not finish") and "DISAGREES" not in shown
