"""Which requests wait for contexts that will be continued, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_vllm.programs import hold
from sgl_vllm.programs.continuations import Context
from sgl_vllm.programs.hold import ContextHold
from sgl_vllm.radix.node import Match, Node
from sgl_vllm.radix.tokens import pack

SIZE = 10
HOLD_S = 5.0


@dataclass(eq=False)
class Request:
    num_tokens: int
    arrival_time: float = 100.0
    num_preemptions: int = 0


@dataclass
class Cache:
    """The part of the cache that is asked, and how often."""

    num_free: int
    num_expected: int
    block_size: int = SIZE
    num_groups: int = 1
    num_asked: int = 0

    @property
    def block_pool(self) -> Any:
        return SimpleNamespace(get_num_free_blocks=lambda: self.num_free)

    @property
    def groups(self) -> Any:
        return SimpleNamespace(tokens_in=lambda n: n * self.block_size // self.num_groups)

    def num_expected_blocks(self) -> int:
        self.num_asked += 1
        return self.num_expected


@dataclass
class Engine:
    """A hundred blocks are free or evictable; `num_expected` of them hold expected contexts."""

    cache: Cache

    def __post_init__(self) -> None:
        cache: Any = self.cache
        self.hold = ContextHold(cache, cache, HOLD_S)

    def must_wait(self, request: Any, num_cached: int = 0, node: Node | None = None) -> bool:
        return self.hold.may_wait(request) and self.hold.waits(request, Match(num_cached, node))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that shows `s`."""
    now = SimpleNamespace(s=101.0)
    monkeypatch.setattr(hold, "time", SimpleNamespace(time=lambda: now.s))
    return now


def engine(num_expected: int = 60) -> Engine:
    return Engine(Cache(num_free=100, num_expected=num_expected))


@pytest.mark.parametrize(("num_tokens", "waits"), [(400, False), (401, True)])
def test_what_does_not_fit_beside_the_expected_contexts_waits(num_tokens: int, waits: bool) -> None:
    assert engine().must_wait(Request(num_tokens)) == waits


@pytest.mark.parametrize(("num_cached", "waits"), [(499, True), (500, False)])
def test_a_request_of_which_half_is_cached_does_not_wait(num_cached: int, waits: bool) -> None:
    assert engine(num_expected=99).must_wait(Request(1000), num_cached) == waits


def test_no_request_waits_for_longer_than_it_may(now: SimpleNamespace) -> None:
    now.s = 104.9
    assert engine().must_wait(Request(900))
    now.s = 105.0
    assert not engine().must_wait(Request(900))


def test_a_preempted_request_does_not_wait() -> None:
    assert not engine().must_wait(Request(900, num_preemptions=1))


def test_what_is_left_of_its_own_context_makes_no_request_wait() -> None:
    root = Node(None, 0, b"", [], 0)
    node = Node(root, 0, pack(range(300)), list(range(30)), 0)
    node.context = Context(node, own_start=0, kinds=(), ended_s=0.0, expected_until_s=200.0)
    assert not engine().must_wait(Request(1000), 300, node)
    assert engine().must_wait(Request(1001), 300, node)


def test_the_cache_is_asked_once_per_step_and_only_if_it_matters() -> None:
    busy = engine()
    busy.must_wait(Request(1000), 900)
    assert busy.cache.num_asked == 0
    for _ in range(3):
        busy.must_wait(Request(900))
    assert busy.cache.num_asked == 1
    busy.hold.step_starts()
    busy.must_wait(Request(900))
    assert busy.cache.num_asked == 2


def test_every_group_needs_a_block_for_the_same_tokens():
    two_groups = Engine(Cache(num_free=100, num_expected=10, num_groups=2))
    assert two_groups.must_wait(Request(41 * SIZE))
    assert not two_groups.must_wait(Request(40 * SIZE))
