"""`sgl-vllm doctor MODEL`: what is asked, what is printed, and the exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sgl_vllm.commands.cli import main
from sgl_vllm.part import BY_OPTION
from sgl_vllm.preview.outlook import KVCacheGroups, Outlook, PartOutlook, Refused, State

ON = PartOutlook("schedule", State.ON)
CHECKED = PartOutlook("fsm", State.CHECKED)
BY_CHOICE = PartOutlook("select", State.OFF, BY_OPTION)
MISSED = PartOutlook("radix", State.OFF, "the model has several KV-cache groups")
HERE = "."
"""A folder, so that the hub is not asked."""

Asked = list[object]


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
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outlook | Exception], Asked]:
    """Stands for vLLM with an answer. Returns a list that what is asked is put into."""

    def set_answer(result: Outlook | Exception) -> Asked:
        asked: Asked = []

        def preview(model: str, flags: list[str], *, is_prediction: bool) -> Outlook:
            asked.append([model, *flags])
            os.write(1, b"a line of native code")
            if isinstance(result, Exception):
                raise result
            return result

        gpu = SimpleNamespace(pretend=lambda: asked.append("as on a GPU"))
        monkeypatch.setitem(sys.modules, "sgl_vllm.preview.gpu", gpu)
        engine = SimpleNamespace(preview=preview)
        monkeypatch.setitem(sys.modules, "sgl_vllm.preview.engine", engine)
        return asked

    return set_answer


@pytest.mark.parametrize(
    ("words", "flags", "on_gpu"),
    [
        ([HERE], [], False),
        ([HERE, "--dtype", "half"], ["--dtype", "half"], False),
        (["--as-on-gpu", HERE, "--dtype", "half"], ["--dtype", "half"], True),
        ([HERE, "--dtype", "half", "--as-on-gpu"], ["--dtype", "half"], True),
        (["--json", HERE, "--port", "80"], ["--port", "80"], False),
        ([HERE, "--json", "--port", "80"], ["--port", "80"], False),
    ],
)
def test_flags_of_the_server_are_passed_on_and_those_of_the_command_are_not(
    answer, capfd, words, flags, on_gpu
) -> None:
    asked = answer(outlook(ON))
    assert main(["doctor", *words]) == 0
    assert asked == ["as on a GPU"] * on_gpu + [[HERE, *flags]]
    printed = capfd.readouterr()
    assert "a line" not in printed.out + printed.err
    if "--json" in words:
        assert json.loads(printed.out)["parts"][0]["name"] == "schedule"


@pytest.mark.parametrize(
    ("parts", "status"),
    [((ON, CHECKED), 0), ((ON, BY_CHOICE), 0), ((ON, MISSED), 1)],
)
def test_the_exit_status_says_whether_a_part_is_missed(answer, capfd, parts, status) -> None:
    answer(outlook(*parts))
    assert main(["doctor", HERE]) == status


def test_the_table_has_each_part_its_state_and_why_it_is_off(answer, capfd) -> None:
    answer(outlook(ON, CHECKED, MISSED, is_prediction=True))
    main(["doctor", "--as-on-gpu", HERE])
    printed = " ".join(capfd.readouterr().out.split())
    assert "the V2 runner, asynchronous scheduling" in printed
    assert "3 groups of SlidingWindowSpec, 30 layers, blocks of 16 tokens" in printed
    assert "schedule on fsm checked at start radix off the model has several" in printed
    assert "This is a prediction" in printed


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"jump_graphs": 34, "why_no_jump_graphs": None}, "jumps run in 34 full CUDA graphs"),
        ({"why_no_jump_graphs": "no backend"}, "jumps leave full CUDA graphs: no backend"),
        ({"why_no_jump_graphs": BY_OPTION}, ""),
    ],
)
def test_the_table_says_how_many_graphs_jumps_cost_or_why_they_have_none(
    answer, capfd, found, line
) -> None:
    answer(replace(outlook(ON), **found))
    main(["doctor", HERE])
    printed = " ".join(capfd.readouterr().out.split())
    assert line in printed
    assert ("jumps" in printed) == bool(line)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Refused("unrecognized arguments: --x"), "unrecognized arguments: --x"),
        (
            ImportError("no\nhook"),
            "vLLM and the plugin cannot be loaded here: ImportError: no hook",
        ),
    ],
)
def test_without_an_answer_there_is_one_line_that_says_why(answer, capfd, error, message) -> None:
    answer(error)
    assert main(["doctor", HERE]) == 2
    assert capfd.readouterr().err == f"sgl-vllm doctor: {message}\n"
    assert main(["doctor", "--json", HERE]) == 2
    assert json.loads(capfd.readouterr().out) == {"error": message}


def test_a_folder_that_is_not_there_is_said(answer, capfd) -> None:
    asked = answer(outlook(ON))
    assert main(["doctor", "./no-model"]) == 2
    assert capfd.readouterr().err == "sgl-vllm doctor: there is no folder ./no-model\n"
    assert asked == []
