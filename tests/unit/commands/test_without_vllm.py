"""Each command where only the client's packages are installed: no vLLM, torch or numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sgl_vllm.commands.cli import COMMANDS
from tests.unit.prompt_lint.synthetic_log import FAULTS, lines, log

ROOT = Path(__file__).resolve().parents[3]
REMEDY = (
    "vLLM is not installed. The server side needs vLLM 0.31 to 0.33: install the build for your "
    "machine (https://docs.vllm.ai/en/latest/getting_started/installation/)."
)


def answers(command_lines: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, str, str]]:
    """The exit status, standard output and standard error of each."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.commands.as_client", json.dumps(command_lines)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(answer) for answer in json.loads(ended.stdout)]


def test_every_help_can_be_read(tmp_path: Path) -> None:
    wanted = [[name, "--help"] for names in COMMANDS.values() for name in names]
    for words, (status, printed, errors) in zip(wanted, answers(wanted, tmp_path), strict=True):
        assert (status, errors) == (0, ""), words
        assert f" Usage: sgl-vllm {words[0]} " in printed, words


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["verify", "x"], 2),
        (["doctor", "MODEL"], 2),
        (["doctor", "--as-on-gpu", "MODEL", "--dtype", "float32"], 2),
        (["quickstart", "--no-browser"], 1),
        (["demo"], 1),
        (["bench", "ab", "tight_cache"], 1),
        (["bench", "kernels"], 1),
    ],
)
def test_what_needs_vllm_says_so_in_one_line_and_writes_nothing(
    tmp_path: Path, words: list[str], status: int
) -> None:
    name = " ".join(words[: 2 if words[0] == "bench" else 1])
    assert answers([words], tmp_path) == [(status, "", f"sgl-vllm {name}: {REMEDY}\n")]
    assert list(tmp_path.iterdir()) == []


def test_what_needs_no_vllm_works(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("\n".join(lines(log(FAULTS))))
    works = {
        ("doctor",): (0, "No problems found"),
        ("version",): (0, "no vLLM (client)"),
        ("examples", "classify.py"): (0, "sgl.select"),
        ("lint-prompts", "requests.jsonl"): (1, "A timestamp that changes"),
        ("bench",): (0, "simulate"),
    }
    for (words, (status, says)), answer in zip(
        works.items(), answers([*works], tmp_path), strict=True
    ):
        assert answer[0] == status and says in answer[1], (words, answer)


def test_ray_serve_says_what_it_needs_in_one_line(tmp_path: Path) -> None:
    ((status, _, error),) = answers([["ray-serve", "models.yaml"]], tmp_path)
    expected = "sgl-vllm ray-serve: PyYAML is not installed: pip install 'sgl-vllm[ray]'\n"
    assert (status, error) == (1, expected)
