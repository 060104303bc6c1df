"""Each command where only the client's packages are installed: no vLLM, torch or numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sgl_vllm.commands.cli import COMMANDS
from tests.unit.prompt_lint.synthetic_log import FAULTS, lines, log

ROOT = Path(__file__).resolve().parents[3]
REMEDY = (
    "vLLM is not installed. The server side needs vLLM 0.31 to 0.33: install the build for your "
    "machine (https://docs.vllm.ai/en/latest/getting_started/installation/)."
)
WORKS = {
    "doctor": (0, "No problems found"),
    "version": (0, "no vLLM (client)"),
    "examples classify.py": (0, "sgl.select"),
    "lint-prompts requests.jsonl": (1, "A timestamp that changes"),
    "bench": (0, "simulate"),
    **{
        f"{name} --help": (0, f" Usage: sgl-vllm {name} ")
        for names in COMMANDS.values()
        for name in names
    },
}
"""For each command line, the exit status and a part of what is printed."""

FAILS = {
    "verify x": (2, REMEDY),
    "doctor MODEL": (2, REMEDY),
    "doctor --as-on-gpu MODEL --dtype float32": (2, REMEDY),
    "doctor --dtype float32 MODEL": (2, "write MODEL before --dtype"),
    "quickstart --no-browser": (1, REMEDY),
    "demo": (1, REMEDY),
    "bench ab tight_cache": (1, REMEDY),
    "bench kernels": (1, REMEDY),
    "ray-serve x": (1, "PyYAML is not installed: pip install '.[ray]' in the repository"),
}
"""For each command line, the exit status and the only line printed, on standard error."""


def test_what_needs_vllm_says_so_in_one_line_and_all_else_works(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("\n".join(lines(log(FAULTS))))
    ended = subprocess.run(  # one process for all of them
        [sys.executable, "-m", "tests.unit.commands.as_client", json.dumps([*FAILS, *WORKS])],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(zip([*FAILS, *WORKS], json.loads(ended.stdout), strict=True))
    for words, (status, line) in FAILS.items():
        name = " ".join(words.split()[: 2 if words.startswith("bench") else 1])
        assert answers[words] == [status, "", f"sgl-vllm {name}: {line}\n"], words
    for words, (status, says) in WORKS.items():
        assert answers[words][0] == status and says in answers[words][1], (words, answers[words])
        assert answers[words][2] == "", words
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]
