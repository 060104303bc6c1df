"""How the outcomes of vLLM's own tests are compared."""

from __future__ import annotations

from tools.vllm_own_tests import by_reason, read_outcomes

STOCK = {"a::test_decode": True, "a::test_new[1]": True, "a::test_broken": False}


def test_only_what_passes_on_stock_vllm_is_a_difference() -> None:
    assert by_reason(STOCK, dict.fromkeys(STOCK, False)).keys() == {
        "design: the tree replaces vLLM's hashes of blocks, which the test reads",
        "",
    }
    assert by_reason(STOCK, STOCK) == {}


def test_errors_are_failures_and_skipped_tests_are_left_out(tmp_path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="worse"><error/></testcase>'
        '<testcase classname="a" name="none"><skipped/></testcase></testsuite></testsuites>'
    )
    assert read_outcomes(report) == {"a::good": True, "a::bad": False, "a::worse": False}
