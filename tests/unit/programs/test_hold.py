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


@dataclass(eq=False)
class Request:
    num_tokens: int
    arrival_time: float = 100.0
    num_preemptions: int = 0


class Engine:
    """Of its cache a hundred blocks are free or evictable, and `num_expected` of them hold expected
    contexts. It is one second after the requests' arrival."""

    def __init__(self, num_expected: int = 60, num_groups: int = 1) -> None:
        self.num_asked = 0
        cache: Any = SimpleNamespace(
            block_size=SIZE,
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: 100),
            groups=SimpleNamespace(tokens_in=lambda n: n * SIZE // num_groups),
        )
        programs: Any = SimpleNamespace(num_expected_blocks=lambda: self.ask(num_expected))
        self.hold = ContextHold(cache, programs, 5.0)

    def ask(self, num_expected: int) -> int:
        self.num_asked += 1
        return num_expected

    def must_wait(self, request: Any, num_cached: int = 0, node: Node | None = None) -> bool:
        return self.hold.may_wait(request) and self.hold.waits(request, Match(num_cached, node))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that shows `s`."""
    now = SimpleNamespace(s=101.0)
    monkeypatch.setattr(hold, "time", SimpleNamespace(time=lambda: now.s))
    return now


@pytest.mark.parametrize(
    ("engine", "request_", "num_cached", "waits"),
    [
        pytest.param({}, Request(400), 0, False, id="fits beside the expected contexts"),
        pytest.param({}, Request(401), 0, True, id="does not"),
        pytest.param({"num_expected": 99}, Request(1000), 499, True, id="less than half cached"),
        pytest.param({"num_expected": 99}, Request(1000), 500, False, id="half cached"),
        pytest.param({}, Request(900, arrival_time=96.1), 0, True, id="has time left"),
        pytest.param({}, Request(900, arrival_time=96.0), 0, False, id="has waited long enough"),
        pytest.param({}, Request(900, num_preemptions=1), 0, False, id="preempted"),
        pytest.param({"num_expected": 10, "num_groups": 2}, Request(400), 0, False, id="2 groups"),
        pytest.param({"num_expected": 10, "num_groups": 2}, Request(410), 0, True, id="do not fit"),
    ],
)
def test_what_does_not_fit_beside_the_expected_contexts_waits(engine, request_, num_cached, waits):
    assert Engine(**engine).must_wait(request_, num_cached) == waits


def test_what_is_left_of_its_own_context_makes_no_request_wait() -> None:
    root = Node(None, 0, b"", [], 0)
    node = Node(root, 0, pack(range(300)), list(range(30)), 0)
    node.context = Context(node, own_start=0, kinds=(), ended_s=0.0, expected_until_s=200.0)
    assert not Engine().must_wait(Request(1000), 300, node)
    assert Engine().must_wait(Request(1001), 300, node)


def test_the_cache_is_asked_once_per_step_and_only_if_it_matters() -> None:
    busy = Engine()
    busy.must_wait(Request(1000), 900)
    assert busy.num_asked == 0
    for _ in range(3):
        busy.must_wait(Request(900))
    assert busy.num_asked == 1
    busy.hold.step_starts()
    busy.must_wait(Request(900))
    assert busy.num_asked == 2
