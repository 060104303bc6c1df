from __future__ import annotations

import logging

import pytest

from sgl_vllm.routing.placement import RequestPlacer
from sgl_vllm.routing.router import PrefixRouter

LONG = "a long prefix that two requests have in common, " * 40


@pytest.fixture
def placer() -> RequestPlacer:
    placer = RequestPlacer(PrefixRouter())
    placer.router.set_workers({"a": False, "b": False})
    return placer


def place(placer, request_id, prompt, open_workers=("a", "b"), num_running=None, **body):
    return placer.place(
        request_id,
        {"prompt": prompt, **body},
        lora=None,
        open_workers=open_workers,
        num_running=num_running or {},
    )


def test_a_replica_that_is_full_is_not_chosen(placer):
    first = place(placer, "1", LONG)
    placer.finished("1")
    (other,) = {"a", "b"} - {first}
    assert place(placer, "2", LONG, open_workers=[other]) == other


def test_requests_of_other_routers_are_load(placer):
    first = place(placer, "1", LONG)
    placer.finished("1")
    assert place(placer, "2", LONG, num_running={first: 1000}) != first


def test_the_end_at_a_replica_that_refused_a_request_is_not_its_end(placer):
    refused_by = place(placer, "1", LONG)
    (other,) = {"a", "b"} - {refused_by}
    assert place(placer, "1", LONG, open_workers=[other]) == other
    placer.finished("1", refused_by)
    assert placer.router.load(other).num_running == 1
    placer.finished("1", other)
    assert placer.router.load(other).num_running == 0


def test_a_removed_replicas_routes_are_dropped(placer):
    first = place(placer, "1", LONG)
    (other,) = {"a", "b"} - {first}
    placer.router.set_workers({other: False})
    assert place(placer, "2", LONG) == other
    placer.finished("1")  # ignored
    placer.router.set_workers({other: False, first: False})
    assert placer.router.load(first).num_running == 0


def test_a_prompt_that_cannot_be_read_is_placed_by_load_with_one_warning(placer, caplog):
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        broken = [LONG, 5]
        assert [place(placer, str(number), [broken]) for number in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "a long prefix" not in caplog.text  # no prompt in a log
    assert place(placer, "tokens", [*range(100)]) in ("a", "b")


def test_a_request_whose_choice_fails_is_placed_by_load_and_no_other(placer, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(placer.router, "choose", lambda *_, **__: 1 / 0)
        assert [place(placer, str(number), LONG) for number in range(3)] == [None] * 3
    assert len(caplog.records) == 2 and "placed by load alone" in caplog.text
    assert place(placer, "next", LONG) in ("a", "b")
