"""Scheduling hints: what a request's `vllm_xargs` may hold."""

import logging

import pytest

from sgl_vllm.protocol.hints import NO_HINTS, Hints, read_hints, write_hints


@pytest.mark.parametrize(
    ("value", "ends"), [(0, 0), (1, 1), (7, 7), (-1, 1), (0.5, 1), ("yes", 1), (True, 1), ([2], 1)]
)
def test_an_end_may_say_how_many_requests_a_context_had(value, ends):
    assert read_hints({"sgl_ends": value}, "id").ends == ends


@pytest.mark.parametrize(
    "hints",
    [
        *(Hints("p", 3, 2, "bash", 1.5), Hints(next_tool="bash"), Hints(ends=1)),
        *(Hints("p", is_ahead=True), NO_HINTS),
        Hints(kept=((300, 1), (3600, 0.5))),
    ],
)
def test_hints_that_are_written_are_read_again(hints):
    assert read_hints(write_hints(hints), "id") == hints


def test_a_name_that_is_too_long_is_cut():
    assert read_hints(write_hints(Hints(next_tool="x" * 300)), "id").next_tool == "x" * 256


def test_forks_are_those_of_one_program_whatever_follows_them():
    assert Hints("p", 1, ends=True).fork == Hints("p", 1).fork != Hints("q", 1).fork
    assert Hints("p").fork is None


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"sgl_ends": 0}])
def test_a_request_without_hints_belongs_to_no_group(extra_args):
    assert read_hints(extra_args, "id") == NO_HINTS
    assert NO_HINTS.routing_group is None


def test_one_engine_gets_a_program_or_else_a_fork_group():
    program = Hints("p").routing_group
    assert Hints("p", 1).routing_group == Hints("p", 2).routing_group == program
    groups = {hints.routing_group for hints in (Hints("p"), Hints("q"), Hints(None, "p"))}
    assert len(groups) == 3


TOO_LONG, TOO_LARGE = "x" * 257, 1 << 65


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sgl_fork_group", [[1], {"a": 1}, 1.5, TOO_LONG, TOO_LARGE]),
        ("sgl_next_tool", [[1], 1.5, TOO_LONG, TOO_LARGE]),
        ("sgl_next_in_s", [-1, 1e9, float("nan"), float("inf"), "3", [3], 1 << 2000]),
        ("sgl_keep", [5, [5], [5, 2], [-1, 1], [float("nan"), 1], ["5", 1], [5, 1] * 5, "5"]),
    ],
)
def test_an_invalid_hint_is_one_warning_without_its_content(name, values, caplog):
    for value in values:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_hints({name: value}, "request 5") == NO_HINTS
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "request 5" in caplog.text and "x" * 20 not in caplog.text


def test_a_long_request_id_is_cut_in_the_log(caplog):
    read_hints({"sgl_program": []}, "r" * 1_000_000)
    assert len(caplog.text) < 500
