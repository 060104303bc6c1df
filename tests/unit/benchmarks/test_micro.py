"""`benchmarks.micro` and the processes it starts, over small benchmarks made here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import micro
from benchmarks.child import ChildFailed, Steps, run_for_json, steps_of, tail
from benchmarks.micro import MICROS, Micro, main

GOOD = """\
import json, sys
from pathlib import Path
from tqdm import tqdm
for _ in tqdm(range(3)):
    pass
print("its own table")
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"arguments": sys.argv[1:]}))
"""
BAD = """\
print("so far so good")
raise SystemExit("the disk is full")
"""


@pytest.fixture
def micros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Micro]:
    (tmp_path / "tiny_good.py").write_text(GOOD)
    (tmp_path / "tiny_bad.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def one(module: str) -> Micro:
        return Micro(
            module,
            f"what {module} measures",
            ("--size", "9"),
            ("--size", "1"),
            lambda content: [("sizes", " ".join(content["arguments"][:2]))],
        )

    return {"bad": one("tiny_bad"), "good": one("tiny_good")}


def test_one_that_fails_is_reported_and_the_others_still_run(
    micros: dict[str, Micro], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "all.json"
    assert main(["--json", str(file)], micros) == 1
    content = json.loads(file.read_text())
    assert content["bad"] == {"error": "so far so good\nthe disk is full"}
    assert content["good"]["arguments"][:2] == ["--size", "9"]
    captured = capsys.readouterr()
    assert "--size 9" in captured.out
    assert "bad failed:\nso far so good\nthe disk is full" in captured.err


def test_only_those_asked_for_run_with_small_sizes(
    micros: dict[str, Micro], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "all.json"
    assert main(["--quick", "--only", "good", "--json", str(file)], micros) == 0
    content = json.loads(file.read_text())
    assert content.keys() == {"good"}
    assert content["good"]["arguments"][:2] == ["--size", "1"]
    assert "bad" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "radix,fast"], "there is no 'fast'; choose from radix, masks, simulate"),
        (["--json", "/no/such/folder/all.json"], "there is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_findings_are_read_from_what_the_benchmarks_write() -> None:
    rows = [{"ratio": 0.5}, {"ratio": 0.75}, {"ratio": 1.25}]
    radix = {"rows": rows, "bytes_per_cached_token": {"16": {"vllm": 8.0, "radix": 10.0}}}
    assert [value for _, value in MICROS["radix"].findings(radix)] == [
        "0.75 (0.50 to 1.25)",
        "1.25",
    ]
    counts = {"tried": 6, "right": 5}
    nothing_compiled = {"schemas": counts, "compile_us": None, "mask_us": {"p50": 7.0}}
    assert MICROS["masks"].findings({"backends": {"sgl": nothing_compiled}}) == [
        ("sgl: schemas right", "5 of 6"),
        ("sgl: mask, p50", "7 us"),
    ]
    wall_s = {"by_hand": 2.0, "sync": 1.0, "async": 3.0, "compiled": 4.0, "list": 1.0, "batch": 1.5}
    client = {"medians": {way: {"wall_s": seconds} for way, seconds in wall_s.items()}}
    assert [value for _, value in MICROS["client"].findings(client)] == [
        "0.50",
        "1.50",
        "2.00",
        "1.50",
    ]
    told = {"decision_p50_us": 90.0, "decision_p99_us": 200.0, "bytes_per_cached_token": 9.876}
    assert MICROS["routing"].findings({"told": told}) == [
        ("told: a decision, p50, p99", "90 us, 200 us"),
        ("told: bytes per cached token", "9.88"),
    ]


# -- the process


def test_the_last_bar_says_how_far_it_is() -> None:
    assert steps_of("loading 3/4\n") is None
    drawn = "a:  10%|█  | 1/10 [00:00<?, ?it/s]\ra:  20%|██ | 2/10 [00:00<00:08]"
    assert steps_of(drawn) == Steps(2, 10)


def test_the_tail_is_what_a_terminal_would_show() -> None:
    assert tail("one\n 1/2 [\r 2/2 [\n\nthree\n", num_lines=2) == " 2/2 [\nthree"


def test_a_process_without_a_result_is_told_by_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="no such luck"):
        run_for_json(("-c", "raise SystemExit('no such luck')"), tmp_path / "none.json")


def test_nothing_is_left_of_a_run_that_is_interrupted(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    )
    source = f"""
from pathlib import Path
from benchmarks.child import run_for_json
run_for_json(("-c", {child + "; time.sleep(60)"!r}), Path("never.json"))
"""
    root = Path(micro.__file__).parent.parent
    ours = subprocess.Popen([sys.executable, "-c", source], cwd=root, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ours.send_signal(signal.SIGINT)
    ours.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
