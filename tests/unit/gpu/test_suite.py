"""The suite's decisions: which steps, for how long, what is left to do, what is said at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
