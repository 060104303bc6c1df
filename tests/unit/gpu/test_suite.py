"""The suite's decisions: which steps, for how long, what is left to do, what is said at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.gpu.configuration import all_configurations
from tools.gpu import steps as plan


@pytest.fixture
def suite(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("suite")


def test_every_step_has_a_name_of_its_own_and_something_to_run(suite: ModuleType) -> None:
    from benchmarks.ab.workloads import WORKLOADS
    from benchmarks.models import SHAPE_PREFIX, SHAPES

    steps = plan.all_steps()
    assert len({step.name for step in steps}) == len(steps)
    files = [one for step in steps for one in step.arguments if one.startswith("tests/")]
    assert all((suite.ROOT / file).is_file() for file in files)
    assert set(plan.WORKLOADS) <= set(WORKLOADS)
    assert {name.removeprefix(SHAPE_PREFIX) for name in plan.MODELS.values()} <= set(SHAPES)
    compared = {
        step.environment.get("SGL_VLLM_GPU_CONFIGURATION")
        for step in steps
        if step.name.startswith("same-answers-")
    }
    assert {*map(str, all_configurations())} <= compared


def run(
    suite: ModuleType, out: Path, *scripts: str, limit_s: int = 30, left_s: float = 1000
) -> dict[str, Any]:
    """Steps that run these scripts, and how each ended; None for one that was not run."""
    steps = [plan.Step(str(n), "", limit_s, ("-c", script)) for n, script in enumerate(scripts)]
    suite.run_all(steps, sys.executable, out, lambda: left_s)
    ended = {step.name: suite.earlier(step, out) for step in steps}
    return {name: result and result.status for name, result in ended.items()}


def test_no_failure_stops_the_rest(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(suite, tmp_path, "raise SystemExit('no luck')", "print('fine')")
    assert ended == {"0": "failed", "1": "passed"}
    assert "no luck" in capsys.readouterr().out
    assert "fine" in (tmp_path / "1" / "log.txt").read_text()


def test_a_step_whose_time_is_up_is_asked_to_end(suite: ModuleType, tmp_path: Path) -> None:
    script = (
        "import time\ntry: time.sleep(60)\n"
        f"except KeyboardInterrupt: open({str(tmp_path / 'partial')!r}, 'w').write('partial')"
    )
    assert run(suite, tmp_path, script, limit_s=1) == {"0": "stopped"}
    assert (tmp_path / "partial").read_text() == "partial"


def test_the_summary_has_every_step_and_what_it_found(suite: ModuleType, tmp_path: Path) -> None:
    junit = (
        '<testsuites><testsuite><testcase name="one"><properties>'
        '<property name="compared" value="520"/></properties></testcase>'
        '<testcase name="two"><failure/></testcase><testcase name="three"><skipped/></testcase>'
        '<testcase time="9.1"/></testsuite></testsuites>'
    )
    script = f"open('{{out}}/junit.xml', 'w').write({junit!r})"
    done = plan.Step("done", "", 1, ("-c", script))
    folder = tmp_path / "done"
    folder.mkdir()
    (folder / "junit.xml").write_text("of an earlier run")
    (folder / "no_sharing.json").write_text(json.dumps({"ratio": {"throughput": 1.004}}))
    rows = [{"ratio": 2.5}, {"ratio": 0.9}, {"off": 0}]
    (folder / "kernels.json").write_text(json.dumps({"kernels": {"prefix_decode": rows}}))
    suite.run_step(done, sys.executable, tmp_path, 30)
    table = suite.summary([done, plan.Step("later", "", 1, ())], tmp_path)
    assert re.sub(r"passed \| \d+ ", "passed | 0 ", table).splitlines()[2:] == [
        "| done | passed | 0 | tests 1 of 3 passed, 1 skipped; compared 520; "
        "prefix_decode 0.90 to 2.50x; no_sharing 1.00x |",
        "| later | not run | | |",
    ]
