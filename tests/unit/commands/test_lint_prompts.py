"""`sgl-vllm lint-prompts`: its output, its errors, and prompts read from a server's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_vllm.commands import cli
from sgl_vllm.commands.client import SglServer
from tests.unit.prompt_lint.synthetic_log import FAULTS, lines, log


@pytest.fixture(scope="module")
def faulty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lint") / "requests.jsonl"
    path.write_text("\n".join(lines(log(FAULTS))))
    return path


def test_the_report_says_what_where_and_how_much(
    faulty_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lint-prompts", str(faulty_log)]) == 1
    printed = capsys.readouterr().out
    assert "100 requests" in printed
    assert "2. A timestamp that changes (Current time)" in printed
    assert "From word 9 on" in printed
    assert "messages[0].system" in printed


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), ("", "has no requests"), ('{"prompt": 1', "line 1 is not JSON")],
)
def test_errors_are_one_line(
    content: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "log.jsonl"
    if content is not None:
        source.write_text(content)
    assert cli.main(["lint-prompts", str(source)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def node(parent: int | None, text: str | None, age_s: float) -> dict[str, Any]:
    return {
        "parent": parent,
        "namespace": 0,
        "age_s": age_s,
        **({} if text is None else {"text": text}),
    }


def test_prompts_are_read_from_a_servers_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    static = "static text of these instructions " * 50
    nodes = [node(None, "Hour ", 0.0)]
    nodes += [node(0, f"{hour}: go.\n{static}", float(hour)) for hour in range(10, 22)]
    monkeypatch.setattr(SglServer, "tree", lambda *_: {"engines": [{"nodes": nodes}, {}]})
    assert cli.main(["lint-prompts", "http://127.0.0.1:8000"]) == 1
    printed = capsys.readouterr().out
    assert "12 requests" in printed
    assert "A number that changes (Hour)" in printed
