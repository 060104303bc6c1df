"""The report, as people and as programs read it."""

import json

from sgl_vllm.commands import verify
from sgl_vllm.self_check.report import CheckReport, PartReport

GOOD = PartReport("radix", num_compared=10, notes={"hit_tokens": 7})
BAD = PartReport("select", ["request 0: token 0 is 1, not 2"])


def test_it_says_what_differed():
    text = CheckReport({"model": "m"}, [GOOD, BAD], states={"radix": "on"}).to_text()
    assert "DISAGREES" in text and "model: m" in text
    assert "radix: agrees (10 tokens compared; largest difference 0; 7 hit tokens)" in text
    assert "select: DISAGREES (request 0: token 0 is 1, not 2;" in text


def test_a_check_of_nothing_does_not_agree():
    report = CheckReport(states={"radix": "by option"})
    assert not report.agrees
    assert "no part was checked, because all are off" in report.to_text()


def test_the_command_writes_it_twice(tmp_path):
    files = verify.write(CheckReport(parts=[GOOD]), tmp_path / "new")
    assert [path.name for path in files] == ["sgl-vllm-verify.json", "sgl-vllm-verify.txt"]
    (part,) = json.loads(files[0].read_text())["parts"]
    assert (part["name"], part["outcome"]) == ("radix", "agrees")
    assert "all parts agree" in files[1].read_text()
