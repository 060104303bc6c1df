"""Runs vLLM's own scheduler and prefix-cache tests on stock vLLM and with the plugin's classes.

Which differences are expected, and why, is in `vllm_own_tests.toml`. The tests are not in vLLM's
wheel; they are in its source distribution on PyPI. No model is downloaded: tests that need one
other than opt-125m, of which only the configuration is read, fail on both sides and do not count.

    python -m tools.vllm_own_tests vllm-0.32.0.tar.gz

Prints the tests that pass on stock vLLM and fail with the plugin, by reason. The exit status is 1
if one of them has no known reason. Takes about six minutes on two cores. Uses no engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

TESTS = "tests/v1/core"
NEED_A_MODEL = (
    "test_scheduler_e2e.py",
    "test_reset_prefix_cache_e2e.py",
    "prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
)
"""Files that run a model from Hugging Face in an engine."""

OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float16"}
"""Transformers' defaults are those of opt-125m."""

SWITCH = '''
"""Gives vLLM's tests the plugin's classes under vLLM's names, as the plugin gives them to vLLM."""
import os

if os.environ.get("WITH_PLUGIN"):
    from sgl_vllm.radix.layouts import why_refused
    from sgl_vllm.radix.manager import RadixKVCacheManager
    from sgl_vllm.scheduler.scheduler import SglAsyncScheduler, SglScheduler, SglSchedulerMixin
    from vllm.v1.core import kv_cache_manager
    from vllm.v1.core.sched import async_scheduler, scheduler

    stock_manager, stock_scheduler = kv_cache_manager.KVCacheManager, scheduler.Scheduler

    def make(*args, **kwargs):
        manager = stock_manager(*args, **kwargs)
        config = manager.kv_cache_config
        if (
            manager.enable_caching
            and not manager.use_eagle
            and not config.has_mamba_layers
            and not (len(config.kv_cache_groups) > 1 and manager.enable_kv_cache_events)
            and why_refused(config, manager.max_model_len) is None
        ):
            RadixKVCacheManager.adopt(manager)
        return manager

    def of_a_scheduler(ours, stocks):
        """Some tests call a method on an object that is no scheduler. They get vLLM's own."""
        return lambda self, *args, **kwargs: (
            ours if isinstance(self, SglSchedulerMixin) else stocks
        )(self, *args, **kwargs)

    for name, method in list(vars(SglSchedulerMixin).items()):
        if name != "__init__" and callable(method) and hasattr(stock_scheduler, name):
            stocks = getattr(stock_scheduler, name)
            setattr(SglSchedulerMixin, name, of_a_scheduler(method, stocks))
    scheduler.Scheduler = SglScheduler
    async_scheduler.AsyncScheduler = SglAsyncScheduler
    kv_cache_manager.KVCacheManager = make
'''

REASONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Why tests fail with the plugin only, and their names without `test_` and parameters."""

Outcomes = Mapping[str, bool]
"""Whether each test passed, by its class and name."""


def unpack(source: Path, folder: Path) -> Path:
    """The folder of vLLM's sources with what its tests need. Only the tests are unpacked."""
    with tarfile.open(source) as archive:
        members = [one for one in archive.getmembers() if one.name.split("/")[1:2] == ["tests"]]
        archive.extractall(folder, members, filter="data")
    (root,) = folder.iterdir()
    (root / "tests" / "conftest.py").unlink()  # imports packages that only vLLM's developers have
    for name in ("facebook/opt-125m", "facebook/opt-350m"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(OPT))
    (root / "with_plugin.py").write_text(SWITCH)
    return root


def outcomes(root: Path, *, plugin: bool) -> Outcomes:
    """Runs the tests; skipped ones are left out."""
    report = root / f"result-{plugin}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "with_plugin"]
    command += ["--timeout", "300", "--junitxml", str(report), TESTS]
    command += [f"--ignore={TESTS}/{name}" for name in NEED_A_MODEL]
    here = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "WITH_PLUGIN": "1" if plugin else "",
        "PYTHONPATH": f"{root}:{here}",
    }
    subprocess.run(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, check=False)
    return read_outcomes(report)


def read_outcomes(report: Path) -> dict[str, bool]:
    """The outcomes in a file of pytest's `--junitxml`."""
    passed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if "skipped" not in tags:
            name = f"{case.get('classname')}::{case.get('name')}"
            passed[name] = not tags & {"failure", "error"}
    return passed


def name_of(test: str) -> str:
    return test.split("::")[1].split("[")[0].removeprefix("test_")


def by_reason(stock: Outcomes, plugin: Outcomes) -> dict[str, list[str]]:
    """The tests that pass on stock vLLM only. Those without a known reason are under ""."""
    reasons = {name: reason for reason, names in REASONS.items() for name in names}
    differing: dict[str, list[str]] = {}
    for test in sorted(stock):
        if stock[test] and not plugin.get(test, False):
            differing.setdefault(reasons.get(name_of(test), ""), []).append(test)
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_own_tests")
    parser.add_argument("source", type=Path, help="vLLM's source distribution (.tar.gz)")
    source: Path = parser.parse_args().source
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(source, Path(folder))
        stock, plugin = (outcomes(root, plugin=plugin) for plugin in (False, True))
    differing = by_reason(stock, plugin)
    for reason, tests in sorted(differing.items()):
        names = ", ".join(dict.fromkeys(map(name_of, tests)))
        print(f"{len(tests):3} {reason or 'NOT KNOWN'}: {names}")
    num_differing = sum(map(len, differing.values()))
    print(f"\n{sum(stock.values())} tests pass on stock vLLM, {num_differing} of them not here")
    return 1 if "" in differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
