"""docs/install.md says what ran on which vLLM, from the results that `make versions` keeps."""

from __future__ import annotations

from dataclasses import asdict

from tools.vllm_versions import Outcome, counts_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.engine.test_radix" name="test_a"/>
<testcase classname="tests.engine.test_radix.TestClass" name="test_b"><failure/></testcase>
<testcase classname="tests.engine.test_queue" name="test_c"><skipped/></testcase>
<testcase classname="" name="tests.engine.test_tiers"><error/></testcase>
</testsuite></testsuites>"""


def counts(passed: int, failed: int, skipped: int, date: str) -> dict[str, int | str]:
    return {"passed": passed, "failed": failed, "skipped": skipped, "date": date}


def test_the_results_are_counted_by_file() -> None:
    counted = counts_of(REPORT)
    numbers = {name: tuple(one.values()) for name, one in counted.items()}
    assert numbers == {
        "test_radix.py": (1, 1, 0),
        "test_queue.py": (0, 0, 1),
        "test_tiers.py": (0, 1, 0),
    }


def test_a_row_says_which_files_ran() -> None:
    some = {
        "test_radix.py": counts(7, 0, 1, "2026-01-01"),
        "test_queue.py": counts(3, 1, 0, "2026-01-02"),
    }
    outcome = Outcome("a build", True, some)
    assert not outcome.ok
    row = outcome.row("0.33.0")
    assert row.startswith("| 0.33.0 | a build | same answers | 2 of ")
    assert row.endswith(" files: `queue`, `radix` | 10 | 1 | 1 | 2026-01-01 to 2026-01-02 |")


def test_a_run_of_some_files_keeps_the_results_of_the_others() -> None:
    before = Outcome("a build", True, {"test_radix.py": counts(7, 0, 0, "2026-01-01")})
    run = Outcome("a build", None, {"test_queue.py": counts(3, 0, 0, "2026-01-02")})
    merged = run.after(before)
    assert merged.demo is True and set(merged.files) == {"test_radix.py", "test_queue.py"}
    assert Outcome(**asdict(merged)) == merged
