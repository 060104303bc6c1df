"""`benchmarks.schemas`: schemas with instances, from a file and made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.schemas import FILE, schemas


def write(folder: Path, *lines: str) -> Path:
    with gzip.open(folder / FILE, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return folder


def test_a_file_gives_schemas_and_instances_as_text(tmp_path: Path) -> None:
    line = {
        "name": "one",
        "schema": {"type": "string"},
        "tests": [
            {"description": "", "valid": True, "data": "é"},
            {"description": "", "valid": False, "data": [1]},
        ],
    }
    (one,) = schemas(write(tmp_path, json.dumps(line)))
    assert (one.name, one.text) == ("one", '{"type": "string"}')
    assert [(each.text, each.valid) for each in one.instances] == [('"é"', True), ("[1]", False)]


def test_a_file_that_is_not_there_or_not_right_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--data: cannot read .*{FILE}"):
        schemas(tmp_path)
    with pytest.raises(ValueError, match="line 2"):
        schemas(write(tmp_path, '{"name": "a", "schema": {}, "tests": []}', '{"name": "b"}'))
    (tmp_path / FILE).write_text("not compressed")
    with pytest.raises(ValueError, match="--data"):
        schemas(tmp_path)


def test_made_up_instances_are_what_they_are_said_to_be() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for one in schemas(None):
        validator = jsonschema.Draft202012Validator(
            json.loads(one.text), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for each in one.instances:
            assert validator.is_valid(json.loads(each.text)) == each.valid, (one, each)
