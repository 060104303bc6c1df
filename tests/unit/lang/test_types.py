"""mypy and pyright accept correct programs, know their types, and reject wrong ones.

Each checker runs once, over `types/right.py`, `types/wrong.py` and the examples. A line of
`wrong.py` that a checker must reject ends with the rules that it breaks: ``# wrong: mypy's,
pyright's``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from sgl_vllm.lang.options import RunOptions

ROOT = Path(__file__).resolve().parents[3]
TYPES = Path(__file__).parent / "types"
RIGHT, WRONG = TYPES / "right.py", TYPES / "wrong.py"
FILES = [RIGHT, WRONG, *sorted((ROOT / "examples").glob("*.py"))]

Errors = dict[tuple[Path, int], set[str]]
"""The rules that are broken, by file and line."""


def output_of(*command: str | Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", *command, *FILES], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


@cache
def errors_of_mypy() -> Errors:
    """With the settings for tests, because `make check` has just filled mypy's cache for them."""
    errors: Errors = defaultdict(set)
    for line in output_of("mypy", "--config-file", "tools/mypy.ini").splitlines():
        if found := re.fullmatch(r"(.+?):(\d+): error: .*\[([a-z-]+)\]", line):
            path, number, rule = found.groups()
            errors[ROOT / path, int(number)].add(rule)
    return errors


@cache
def errors_of_pyright() -> Errors:
    errors: Errors = defaultdict(set)
    report = json.loads(output_of("pyright", "--outputjson", "--pythonpath", sys.executable))
    assert report["summary"]["filesAnalyzed"] >= len(FILES)
    for found in report["generalDiagnostics"]:
        if found["severity"] == "error":
            number = found["range"]["start"]["line"] + 1
            errors[Path(found["file"]), number].add(found["rule"])
    return errors


def test_correct_programs_give_run_each_of_its_options_alone() -> None:
    alone = re.findall(r'^    story\.run\("hare", (\w+)=[^,]*\)$', RIGHT.read_text(), re.M)
    assert {*alone} == {*RunOptions.__annotations__} and len({*alone}) == len(alone) == 19


CHECKERS = pytest.mark.parametrize(
    ("checker", "errors_of"),
    [
        pytest.param(0, errors_of_mypy, id="mypy"),
        pytest.param(1, errors_of_pyright, id="pyright", marks=pytest.mark.slow),
    ],
)


@CHECKERS
def test_correct_programs_and_the_examples_are_accepted(checker, errors_of) -> None:
    assert {place: rules for place, rules in errors_of().items() if place[0] != WRONG} == {}


@CHECKERS
def test_wrong_programs_are_rejected_where_they_are_wrong(checker, errors_of) -> None:
    expected = {}
    for number, line in enumerate(WRONG.read_text().splitlines(), 1):
        if "# wrong: " in line:
            expected[number] = line.partition("# wrong: ")[2].split(", ")[checker]
    assert len(expected) >= 10
    found = {place[1]: rules for place, rules in errors_of().items() if place[0] == WRONG}
    assert found.keys() == expected.keys()
    for number, rule in expected.items():
        assert rule in found[number], f"line {number}"
