import logging

import pytest

from sgl_vllm.protocol.hints import NO_HINTS, Hints, hints_in


def test_a_request_says_what_program_and_fork_it_is_of():
    assert hints_in({"sgl_program": "p17", "sgl_fork_group": 3}, "id") == Hints("p17", 3)
    assert hints_in({"sgl_fork_group": "f"}, "id") == Hints(None, "f")


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_who_says_nothing_is_with_nobody(extra):
    assert hints_in(extra, "id") == NO_HINTS
    assert NO_HINTS.together is None


def test_one_engine_gets_a_program_or_else_a_fork_group():
    assert Hints("p", 1).together == Hints("p", 2).together == Hints("p").together
    assert len({Hints("p").together, Hints("q").together, Hints(None, "p").together}) == 3


@pytest.mark.parametrize("group", [[1], {"a": 1}, 1.5, "x" * 257, 1 << 65])
def test_what_cannot_be_read_is_one_warning_without_its_content(group, caplog):
    with caplog.at_level(logging.WARNING):
        assert hints_in({"sgl_fork_group": group}, "request 5") == NO_HINTS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "request 5" in caplog.text and "x" * 20 not in caplog.text
