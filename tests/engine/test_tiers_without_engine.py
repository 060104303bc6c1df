"""What reaches a KV connector, with a connector and a tree that only note what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_vllm.radix.stats import RadixCounters
from sgl_vllm.tiers.connector import Tiers
from sgl_vllm.tiers.load_rule import LoadRule


class Request:
    def __init__(self, num_tokens: int, **more) -> None:
        self.request_id = "a"
        self.num_tokens = num_tokens
        self.num_preemptions = 0
        self.kv_transfer_params = None
        self.skip_reading_prefix_cache = False
        vars(self).update(more)


class Connector:
    """Has `found` tokens of everybody."""

    def __init__(self, found: int | None, is_async: bool) -> None:
        self.answer = found, is_async
        self.asked: list[int] = []
        self.loaded: list[int] = []

    def get_num_new_matched_tokens(self, request, num_local):
        self.asked.append(num_local)
        return self.answer

    def update_state_after_alloc(self, request, blocks, num_external):
        self.loaded.append(num_external)


class Below:
    """A connector under the rule, and what a scheduler does with it."""

    def __init__(self, found: int | None = 96, is_async: bool = True, **rule) -> None:
        self.connector = Connector(found, is_async)
        self.counters = RadixCounters()
        radix: Any = SimpleNamespace(block_size=32, counters=self.counters, first_scored={})
        self.rule = LoadRule(**rule)
        self.tiers = Tiers(self.connector, radix, self.rule)

    def admit(self, request: Request, num_local: int = 0) -> int | None:
        found, _ = self.connector.get_num_new_matched_tokens(request, num_local)
        if found is not None:
            self.connector.update_state_after_alloc(request, None, found)
        return found


def test_the_connector_is_not_asked_for_a_request_with_too_little_left():
    below = Below(min_tokens=128)
    assert below.admit(Request(200), num_local=96) == 0
    assert (below.connector.asked, below.connector.loaded) == ([], [0])
    assert below.counters.tier_requests_not_asked == 1
    assert below.counters.tier_declined_tokens == 0


def test_what_is_found_and_too_little_is_declined():
    below = Below(min_tokens=128)
    assert below.admit(Request(400)) == 0
    assert (below.connector.asked, below.connector.loaded) == ([0], [0])
    assert below.counters.tier_declined_tokens == 96
    assert below.counters.tier_requests_not_asked == 0


@pytest.mark.parametrize(
    "kind",
    [{"kv_transfer_params": {"do_remote_prefill": True}}, {"skip_reading_prefix_cache": True}],
)
def test_a_request_that_has_no_choice_is_always_asked_for(kind):
    below = Below(min_tokens=10_000)
    assert below.admit(Request(40, **kind)) == 96


def test_loads_that_end_well_are_measured():
    below = Below()
    done = SimpleNamespace(finished_recving={"a"}, invalid_block_ids=set(), failed_recving=set())
    failed = SimpleNamespace(finished_recving={"a"}, invalid_block_ids={7}, failed_recving=set())
    for output, num_measured in ((failed, 0), (done, 1)):
        below.admit(Request(200))
        below.tiers.before_update(None, SimpleNamespace(kv_connector_output=output), {})
        assert sum(map(len, below.rule.loads._sizes.values())) == num_measured


def test_an_error_in_the_rule_leaves_the_connector_as_it_was():
    below = Below()

    def fail(num_tokens: int) -> bool:
        raise ZeroDivisionError

    below.rule.declines = fail  # type: ignore[method-assign]
    assert [below.admit(Request(200)) for _ in range(3)] == [96] * 3
    assert below.connector.loaded == [96] * 3
