import logging

import pytest

from sgl_vllm.hints import fork_group_in


def test_a_fork_group_is_one_of_its_program():
    assert fork_group_in({"sgl_program": "p17", "sgl_fork_group": 3}, "id") == ("p17", 3)
    assert fork_group_in({"sgl_fork_group": "f"}, "id") == (None, "f")


@pytest.mark.parametrize("extra", [None, {}, {"sgl_program": "p"}, {"other": 1}])
def test_who_says_nothing_is_in_no_group(extra):
    assert fork_group_in(extra, "id") is None


@pytest.mark.parametrize("group", [[1], {"a": 1}, 1.5, "x" * 257, 1 << 65])
def test_what_cannot_be_read_is_one_warning_without_its_content(group, caplog):
    with caplog.at_level(logging.WARNING):
        assert fork_group_in({"sgl_fork_group": group}, "request 5") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "request 5" in caplog.text and "x" * 20 not in caplog.text
