"""Release notes and the long description, and the commands that find what the wheel carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_vllm import shipped
from sgl_vllm.commands import cli, examples
from tools.release.__main__ import newest_notes

CHANGELOG = """\
# Changelog

## 0.2.0 (2027-01-31)

- Faster ([docs](docs/cache.md#tenants), [vLLM](https://vllm.ai)).

### Fixed

- A leak.

## 0.1.0 (2026-12-01)

First release.
"""


def test_notes_are_the_newest_section_with_links_that_work_elsewhere() -> None:
    version, date, text = newest_notes(CHANGELOG, "https://host/v0.2.0")
    assert (version, date) == ("0.2.0", "2027-01-31")
    assert text == (
        "- Faster ([docs](https://host/v0.2.0/docs/cache.md#tenants), [vLLM](https://vllm.ai)).\n\n"
        "### Fixed\n\n- A leak.\n"
    )


def test_an_unknown_benchmark_is_answered_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "rdx"]) == 2
    expected = "sgl-vllm bench: unknown benchmark rdx; did you mean radix?\n"
    assert capsys.readouterr().err == expected
    assert cli.main(["bench", "zzz"]) == 2
    assert "unknown benchmark zzz; there are ab, " in capsys.readouterr().err


def test_each_example_and_configuration_file_has_a_line_in_the_list() -> None:
    lines = {name: shipped.summary_of(file) for name, file in examples.files().items()}
    assert all(len(line) > 20 and line.endswith(".") for line in lines.values()), lines
    assert lines["tutorial.ipynb"] == "Programs for language models, in twenty minutes."


def test_copied_examples_keep_their_folders_and_overwrite_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = ["examples", "serving/ray.yaml", "--copy", str(tmp_path)]
    assert cli.main(copy) == 0
    copied = tmp_path / "serving" / "ray.yaml"
    assert copied.read_bytes() == examples.files()["serving/ray.yaml"].read_bytes()
    copied.write_text("mine")
    assert cli.main(copy) == 2
    assert "exists already" in capsys.readouterr().err
    assert copied.read_text() == "mine"
    for words in (["nope.py"], ["all"], ["nope.py", "--copy", "x"]):
        assert cli.main(["examples", *words]) == 2
        assert "sgl-vllm examples: " in capsys.readouterr().err
