"""`sgl-vllm doctor MODEL`: what is asked, what is printed, and the exit status."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from sgl_vllm.commands.cli import main
from sgl_vllm.part import BY_OPTION
from sgl_vllm.preview.outlook import KVCacheGroups, Outlook, PartOutlook, State

ON = PartOutlook("schedule", State.ON)
CHECKED = PartOutlook("fsm", State.CHECKED)
BY_CHOICE = PartOutlook("select", State.OFF, BY_OPTION)
MISSED = PartOutlook("radix", State.OFF, "the model has several KV-cache groups")

Answer = Callable[..., list[list[str]]]


def outlook(*parts: PartOutlook, is_prediction: bool = False) -> Outlook:
    return Outlook(
        model="m",
        device="NVIDIA H100",
        is_prediction=is_prediction,
        model_runner="V2",
        is_async=True,
        prefix_caching=True,
        kv_cache=[KVCacheGroups("SlidingWindowSpec", 16, 3, 30)],
        parts=list(parts),
    )


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Let the other process print some text. Returns a list that its command lines are put into."""

    def set_answer(stdout: str, stderr: str = "", returncode: int = 0) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            asked.append(command[command.index("sgl_vllm.preview") + 1 :])
            return subprocess.CompletedProcess(command, returncode, stdout, stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    return set_answer


def says(outlook: Outlook) -> str:
    return f"INFO a line that vLLM logs\nsgl_vllm.preview {outlook.to_json()}\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["m"], ["m"]),
        (["m", "--dtype", "half"], ["m", "--dtype", "half"]),
        (["--as-on-gpu", "m", "--dtype", "half"], ["--as-on-gpu", "m", "--dtype", "half"]),
        (["m", "--dtype", "half", "--as-on-gpu"], ["--as-on-gpu", "m", "--dtype", "half"]),
        (["--json", "m", "--port", "80"], ["m", "--port", "80"]),
        (["m", "--json", "--port", "80"], ["m", "--port", "80"]),
    ],
)
def test_flags_of_the_server_are_passed_on_and_those_of_the_command_are_not(
    answer: Answer, words: list[str], asked: list[str]
) -> None:
    commands = answer(says(outlook(ON)))
    assert main(["doctor", *words]) == 0
    assert commands == [asked]


@pytest.mark.parametrize(
    ("parts", "status"),
    [((ON, CHECKED), 0), ((ON, BY_CHOICE), 0), ((ON, MISSED), 1)],
)
def test_the_exit_status_says_whether_a_part_is_missed(
    answer: Answer, parts: tuple[PartOutlook, ...], status: int
) -> None:
    answer(says(outlook(*parts)))
    assert main(["doctor", "m"]) == status


def test_the_table_has_each_part_its_state_and_why_it_is_off(
    answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(says(outlook(ON, CHECKED, MISSED, is_prediction=True)))
    main(["doctor", "--as-on-gpu", "m"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "the V2 runner, asynchronous scheduling" in printed
    assert "3 groups of SlidingWindowSpec, 30 layers, blocks of 16 tokens" in printed
    assert "schedule on fsm checked at start radix off the model has several" in printed
    assert "This is a prediction" in printed


@pytest.mark.parametrize(
    ("stdout", "stderr", "message"),
    [
        ('sgl_vllm.preview {"refused": "unrecognized arguments: --x"}', "", "arguments: --x"),
        ("", "Traceback\nImportError: no hook\n", "loaded here: ImportError: no hook"),
        ("", "", "exit status 9"),
    ],
)
def test_without_an_answer_there_is_one_line_that_says_why(
    answer: Answer,
    capsys: pytest.CaptureFixture[str],
    stdout: str,
    stderr: str,
    message: str,
) -> None:
    answer(stdout, stderr, returncode=9)
    assert main(["doctor", "m"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert main(["doctor", "--json", "m"]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]
