from __future__ import annotations

import logging

import pytest

from sgl_vllm.routing.placement import Placement
from sgl_vllm.routing.router import PrefixRouter

LONG = "a long beginning that two requests have in common, " * 40


@pytest.fixture
def placement() -> Placement:
    placement = Placement(PrefixRouter())
    placement.router.set_workers({"a": False, "b": False})
    return placement


def place(placement, request_id, prompt, open_workers=("a", "b"), num_running=None, **body):
    return placement.place(
        request_id,
        {"prompt": prompt, **body},
        lora=None,
        open_workers=open_workers,
        num_running=num_running or {},
    )


def test_a_request_goes_where_its_beginning_is(placement):
    first = place(placement, "1", LONG)
    placement.finished("1")
    other = place(placement, "2", "something else " * 100)
    assert other != first
    placement.finished("2")
    assert place(placement, "3", LONG + "and on") == first


def test_a_replica_that_is_full_is_not_chosen(placement):
    first = place(placement, "1", LONG)
    placement.finished("1")
    (other,) = {"a", "b"} - {first}
    assert place(placement, "2", LONG, open_workers=[other]) == other


def test_with_all_full_nobody_is_chosen_and_nothing_is_left_behind(placement):
    assert place(placement, "1", LONG, open_workers=[]) is None
    assert all(placement.router.load(worker).num_running == 0 for worker in "ab")


def test_what_other_routers_have_sent_counts(placement):
    first = place(placement, "1", LONG)
    placement.finished("1")
    assert place(placement, "2", LONG, num_running={first: 1000}) != first


def test_a_request_placed_again_counts_once(placement):
    for _ in range(3):
        worker = place(placement, "1", LONG)
    assert placement.router.load(worker).num_running == 1


def test_the_end_at_a_replica_that_refused_it_is_not_its_end(placement):
    refused_by = place(placement, "1", LONG)
    (other,) = {"a", "b"} - {refused_by}
    assert place(placement, "1", LONG, open_workers=[other]) == other
    placement.finished("1", refused_by)
    assert placement.router.load(other).num_running == 1
    placement.finished("1", other)
    assert placement.router.load(other).num_running == 0


def test_a_replica_that_has_gone_takes_what_is_known_of_it_along(placement):
    first = place(placement, "1", LONG)
    (other,) = {"a", "b"} - {first}
    placement.router.set_workers({other: False})
    assert place(placement, "2", LONG) == other
    placement.finished("1")  # of no interest any more
    placement.router.set_workers({other: False, first: False})
    assert placement.router.load(first).num_running == 0


def test_tenants_do_not_meet(placement):
    place(placement, "1", LONG, cache_salt="one")
    cached = placement.router.cached_tokens(LONG.encode())
    assert set(cached.values()) == {0}


def test_a_replica_whose_events_are_followed_from_now_on_is_another(placement):
    first = place(placement, "1", LONG)
    placement.router.set_workers({"a": False, "b": False} | {first: True})
    assert placement.router.load(first).num_running == 0
    assert placement.router.apply_events(first, [], 0)


def test_when_routing_fails_requests_go_by_load_and_it_is_said_once(caplog):
    def fail(body):
        raise RuntimeError("no such template")

    placement = Placement(PrefixRouter(), fail)
    placement.router.set_workers({"a": False})
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        assert [place(placement, str(number), LONG) for number in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "a long beginning" not in caplog.text  # no prompt in a log
