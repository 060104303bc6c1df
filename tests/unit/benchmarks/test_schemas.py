"""`benchmarks.schemas`: schemas with instances, from a file and made up."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.schemas import (
    DRAFT_7,
    FILE,
    NUM_GENERATED,
    generated,
    is_plain,
    load_suite,
    schemas,
)


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


def test_made_up_schemas_are_always_the_same_and_have_instances_of_both_kinds() -> None:
    made = generated()
    assert made == generated() == schemas(None)
    assert len(made) == len({one.text for one in made}) == NUM_GENERATED
    assert generated(seed=1) != made
    for one in made:
        assert {each.valid for each in one.instances} == {True, False}
        assert json.loads(one.text)["type"] == "object"


def test_made_up_instances_are_what_they_are_said_to_be() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for one in generated(120):
        validator = jsonschema.Draft202012Validator(
            json.loads(one.text), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for each in one.instances:
            assert validator.is_valid(json.loads(each.text)) == each.valid, (one, each)


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "string", "pattern": "^a"}, True),
        ({"type": "string", "pattern": "^a", "maxLength": 3}, False),
        ({"type": "string", "format": "color"}, False),
        ({"properties": {"not": {"type": "string"}}}, True),  # a field may have any name
        ({"properties": {"a": {"not": {"type": "string"}}}}, False),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"uniqueItems": True}}}, False),
        ({"items": {"$ref": "https://example.org/schema"}}, False),
        ({"anyOf": [{"type": "null"}, {"allOf": []}]}, False),
        ({"enum": [{"not": 1}]}, True),
        (True, True),
    ],
)
def test_what_only_some_backends_take_is_not_plain(schema: object, plain: bool) -> None:
    assert is_plain(schema) is plain


def suite_of(folder: Path, **files: object) -> Path:
    archive = folder / "suite.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"suite-1.0/{name.replace('__', '/')}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def test_a_suite_gives_the_schemas_of_its_drafts(tmp_path: Path) -> None:
    group = {
        "description": "one",
        "schema": {"type": "string"},
        "tests": [
            {"description": "", "data": "é", "valid": True},
            {"data": "\ud800", "valid": False},
        ],
    }
    archive = suite_of(
        tmp_path,
        tests__draft7__type=[group],
        tests__draft2020__optional__type=[group],
        tests__draft4__type=[group],
        remotes__draft7__type={"type": "string"},
    )
    new, old = load_suite(archive, ("draft7", "draft2020"))
    assert (new.name, old.name) == ("draft2020/optional/type: one", "draft7/type: one")
    assert new.text == '{"type": "string"}'
    assert json.loads(old.text) == {"$schema": DRAFT_7, "type": "string"}
    assert [(each.text, each.valid) for each in old.instances] == [
        ('"é"', True),
        ('"\\ud800"', False),
    ]
