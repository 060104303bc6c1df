"""`sgl-vllm quickstart`, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sgl_vllm.server_process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "sgl_vllm.commands.cli", "quickstart", "--no-browser"]


@pytest.fixture(scope="module")
def quickstart() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, once it has printed everything, and the server's address."""
    command = [*COMMAND, "--port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    try:
        printed = ""
        while "Ctrl-C" not in printed:
            line = process.stdout.readline()
            assert line, f"it has ended: {printed}"
            printed += line
        found = re.search(r"(http://\S+)/sgl/tree", printed)
        assert found is not None
        yield process, found.group(1)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def url(quickstart: tuple[subprocess.Popen[str], str]) -> str:
    return quickstart[1]


def test_the_guide_prints_hits_and_forced_tokens(url: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "guide.py"), "--url", url],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "The capital of Peru is Lima." in ran.stdout, ran.stderr
    for what in (r"prompt tokens · (\d+) cached", r"generated tokens · (\d+) forced"):
        counts = re.findall(rf"(\d+) {what}", ran.stdout)
        assert len(counts) == 2
        assert all(0 < int(part) < int(whole) for whole, part in counts), ran.stdout


def test_its_page_shows_what_the_guide_has_sent(url: str) -> None:
    assert "<html" in httpx.get(f"{url}/sgl/tree").raise_for_status().text
    (engine,) = httpx.get(f"{url}/v1/sgl/tree").json()["engines"]
    assert any("What is the capital of" in node["text"] for node in engine["nodes"])


def test_a_forced_call_has_valid_arguments_and_guidances_grammars_are_taken(url: str) -> None:
    schema = {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}
    tool = {"type": "function", "function": {"name": "capital", "parameters": schema}}
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Peru?"}], "max_tokens": 64}
    body = {**ask, "tools": [tool], "tool_choice": "required"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"of"}
    body = {**ask, "structured_outputs": {"grammar": '%llguidance {}\nstart: "yes"'}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    assert answer.json()["choices"][0]["message"]["content"] == "yes"


def test_ctrl_c_ends_everything(quickstart: tuple[subprocess.Popen[str], str]) -> None:
    """The last test of this module."""
    process, url = quickstart
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5).close()
