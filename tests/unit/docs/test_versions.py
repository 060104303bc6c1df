"""docs/install.md says what ran on which vLLM, from the results that `make versions` keeps."""

from __future__ import annotations

from tools.vllm_versions import counts_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.engine.test_radix" name="test_a"/>
<testcase classname="tests.engine.test_radix.TestClass" name="test_b"><failure/></testcase>
<testcase classname="tests.engine.test_queue" name="test_c"><skipped/></testcase>
<testcase classname="" name="tests.engine.test_tiers"><error/></testcase>
</testsuite></testsuites>"""


def test_the_results_are_counted_by_file() -> None:
    counted = counts_of(REPORT)
    numbers = {name: tuple(one.values()) for name, one in counted.items()}
    assert numbers == {
        "test_radix.py": (1, 1, 0),
        "test_queue.py": (0, 0, 1),
        "test_tiers.py": (0, 1, 0),
    }
