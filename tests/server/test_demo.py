"""The whole way through: the demo's command, two real servers, the shipped model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_demo_gives_the_same_answers_for_less_computing() -> None:
    command = [sys.executable, "-m", "sgl_vllm.commands.cli", "demo", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(finished.stdout)
    stock, plugin = result["arms"]["stock"], result["arms"]["plugin"]
    assert result["same_answers"]
    assert plugin["forward_passes"] < stock["forward_passes"]
    assert plugin["computed_prompt_tokens"] < stock["computed_prompt_tokens"]
    assert plugin["forced_tokens"] > 0
    assert stock["forced_tokens"] == 0

    guides = {guide["country"]: guide for guide in plugin["guides"]}
    assert "Paris" in guides["France"]["capital"]
    assert "Tokyo" in guides["Japan"]["capital"]
    assert guides["Egypt"]["continent"] == "Africa"
    assert json.loads(guides["Brazil"]["card"])["continent"] in guides["Brazil"]["continent"]
