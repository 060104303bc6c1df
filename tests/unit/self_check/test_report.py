"""When two answers to one canary are the same, and the report as people and programs read it."""

import json
import math

import pytest

from sgl_vllm.commands import verify
from sgl_vllm.self_check.report import Answer, CheckReport, PartReport, Row, tolerance_of


def answer(*rows: Row) -> Answer:
    """Each row begins with the chosen token."""
    return Answer([next(iter(row)) for row in rows], list(rows), "length")


def problems(got: Answer, want: Answer, tolerance: float = 0.1) -> list[str]:
    found = PartReport("radix")
    found.compare([got], [want], tolerance)
    return found.problems


WANT = answer({5: -0.1, 6: -2.0}, {7: -0.5, 8: -0.55}, {9: -1.0, 1: -1.5})


def test_rounding_agrees_and_more_does_not():
    assert not problems(answer({5: -0.12}, *WANT.rows[1:]), WANT)
    assert "log-probability -0.3, not -0.1" in problems(answer({5: -0.3}, *WANT.rows[1:]), WANT)[0]


def test_where_two_tokens_are_equally_likely_the_rest_is_not_compared():
    found = PartReport("radix")
    found.compare([answer(WANT.rows[0], {8: -0.52, 7: -0.53}, {4: -9.0})], [WANT], 0.1)
    assert (found.problems, found.num_ties, found.num_compared) == ([], 1, 2)


def test_at_a_tie_the_chosen_token_has_the_reference_s_log_probability():
    got = answer(WANT.rows[0], {8: -5.0, 7: -0.5}, {4: -9.0})
    assert "token 1 has log-probability -5, not -0.55" in problems(got, WANT)[0]


@pytest.mark.parametrize("reason", ["", "error", "abort"])
def test_after_a_tie_an_answer_still_has_to_end_by_itself(reason: str):
    got = answer(WANT.rows[0], {8: -0.52, 7: -0.53})
    got.finish_reason = reason
    assert f"it ended by {reason or 'nothing'}, not length" in problems(got, WANT)[0]
    got.finish_reason = "stop"
    assert not problems(got, WANT)


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (answer({6: -0.1}, *WANT.rows[1:]), "token 0 is 6, not 5, which is likelier by 1.9"),
        (answer({3: -0.1}, *WANT.rows[1:]), "not among the likeliest"),
        (answer(*WANT.rows[:2]), "it has 2 tokens, not 3"),
        (answer({5: math.nan}, *WANT.rows[1:]), "log-probability nan"),
        (Answer(WANT.tokens, WANT.rows, "stop"), "it ended by stop, not length"),
    ],
)
def test_other_answers_do_not_agree(got, says):
    assert says in problems(got, WANT)[0]


def test_scores_have_no_other_candidates():
    want = answer({4: -1.0}, {5: -2.0})
    assert not problems(answer({4: -1.04}, {5: -2.0}), want)
    assert "token 0 is 5, not 4" in problems(answer({5: -2.0}, {4: -1.0}), want)[0]
    assert "token 1 has log-prob" in problems(answer({4: -1.0}, {5: -1.0}), want)[0]


def test_many_small_differences_are_a_fault():
    want = answer(*({5: -1.0} for _ in range(8)))
    got = answer(*({5: -1.08} for _ in range(8)))
    assert "on average" in problems(got, want)[0]


@pytest.mark.parametrize(
    ("dtype", "noise", "tolerance"),
    [("float32", 0, 0.02), ("float32", 0.01, 0.04), ("bfloat16", 0, 0.5), ("bfloat16", 9, 2)],
)
def test_the_tolerance_follows_the_noise_of_the_device(dtype, noise, tolerance):
    assert tolerance_of(dtype, noise) == tolerance


# -- the report -----------------------------------------------------------------------------------

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
    files = verify.write(CheckReport(parts=[GOOD]), tmp_path)
    assert [path.name for path in files] == ["sgl-vllm-verify.json", "sgl-vllm-verify.txt"]
    report = json.loads(files[0].read_text())
    assert report["agrees"] and report["parts"][0]["name"] == "radix"
    assert "all parts agree" in files[1].read_text()
