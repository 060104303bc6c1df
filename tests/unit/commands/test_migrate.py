"""`sgl-vllm migrate`: what it rewrites, what it leaves, and when it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_vllm.commands import cli
from sgl_vllm.commands.migration import migrate

PROGRAM = """\
import json  # sglang is only in this comment

import sglang as sgl
from sglang.utils import read_jsonl

# Größe: a comment whose letters take more than a byte.
é = "x"; backend = sgl.RuntimeEndpoint("http://localhost:30000", chat_template_name="qwen")
print("import sglang", é, backend.model_info["model_path"])
"""

MIGRATED = """\
import json  # sglang is only in this comment

import sgl_vllm.sglang as sgl
from sgl_vllm.sglang.utils import read_jsonl

# Größe: a comment whose letters take more than a byte.
é = "x"; backend = sgl.RuntimeEndpoint("http://localhost:8000")
print("import sglang", é, backend.get_model_name())
"""


def test_a_program_is_rewritten_and_its_layout_stays() -> None:
    assert migrate(PROGRAM).text == MIGRATED


@pytest.mark.parametrize(
    "before, after",
    [
        ("import sglang", "import sgl_vllm.sglang as sglang"),
        ("import sglang as sgl, json", "import sgl_vllm.sglang as sgl, json"),
        (
            "import sglang.lang.ir",
            "import sgl_vllm.sglang.lang.ir, sgl_vllm.sglang as sglang",
        ),
        ("import sglang.lang.ir as ir", "import sgl_vllm.sglang.lang.ir as ir"),
        ("from sglang import (\n    gen,\n)", "from sgl_vllm.sglang import (\n    gen,\n)"),
        ("def f():\n    from sglang import gen", "def f():\n    from sgl_vllm.sglang import gen"),
        ("import sglang_router", "import sglang_router"),
        ("from .sglang import gen", "from .sglang import gen"),
        (
            'RuntimeEndpoint(base_url=f"{host}:30000", verify="k",\n  chat_template_name="x")',
            'RuntimeEndpoint(base_url=f"{host}:8000", verify="k")',
        ),
        ('other("http://localhost:30000")', 'other("http://localhost:30000")'),
        ('model_info["other"]', 'model_info["other"]'),
    ],
)
def test_what_is_rewritten_and_what_is_left(before: str, after: str) -> None:
    assert migrate(before).text == after


def test_what_was_migrated_stays_as_it_is() -> None:
    assert migrate(MIGRATED).text == MIGRATED


def test_a_module_without_a_counterpart_is_reported() -> None:
    migrated = migrate("import os\nfrom sglang.srt.server_args import ServerArgs\n")
    assert migrated.remarks == (
        "line 2: replace what sglang.srt.server_args is for: it is not in sgl_vllm.sglang",
    )


def test_a_name_without_a_counterpart_is_reported() -> None:
    text = "from sglang import Engine, gen, utils\nfrom sglang.lang.ir import *\n"
    assert migrate(text).remarks == (
        "line 1: replace what sglang.Engine is for: it is not in sgl_vllm.sglang",
    )


def test_the_changes_are_shown_and_written_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(PROGRAM.replace("\n", "\r\n").encode())
    assert cli.main(["migrate", str(path)]) == 0
    shown = capsys.readouterr()
    assert "-import sglang as sgl" in shown.out and "+import sgl_vllm.sglang as sgl" in shown.out
    assert "1 file to change (--write changes them)" in shown.err
    assert path.read_bytes().decode() == PROGRAM.replace("\n", "\r\n")
    assert cli.main(["migrate", "--write", str(path)]) == 0
    assert "1 file changed" in capsys.readouterr().err
    assert path.read_bytes().decode() == MIGRATED.replace("\n", "\r\n")


def test_a_file_that_is_not_python_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text("def:")
    good.write_text("import sglang as sgl\n")
    assert cli.main(["migrate", "--write", str(bad), str(good)]) == 1
    assert f"{bad} cannot be read as Python" in capsys.readouterr().err
    assert good.read_text() == "import sgl_vllm.sglang as sgl\n"
