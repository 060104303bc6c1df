"""Which requests of agents wait, and while what is so, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_vllm.programs import admission
from sgl_vllm.programs.admission import HOLD_PER_WAIT, Admission
from sgl_vllm.radix.node import Match

SIZE = 10
CACHE = 100 * SIZE
PAUSE_S = 5.0


@dataclass(eq=False)
class Request:
    num_tokens: int
    priority: int = 0
    request_id: str = ""


class Engine:
    """Of its cache a hundred blocks are free or evictable, and `num_expected` of them hold expected
    contexts."""

    def __init__(self, num_expected: int = 60, num_groups: int = 1, again: int = CACHE) -> None:
        self.num_asked = 0
        self.horizon_s = 0.0
        self.missed = 0, 0
        cache: Any = SimpleNamespace(
            block_size=SIZE,
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: 100, num_gpu_blocks=100),
            groups=SimpleNamespace(tokens_in=lambda n: n * SIZE // num_groups),
            misses=SimpleNamespace(num_missed=lambda name: self.missed),
        )
        programs: Any = SimpleNamespace(
            num_expected_blocks=lambda: self.ask(num_expected),
            agent_pause_s=lambda share: PAUSE_S,
            expect_within=lambda horizon_s: setattr(self, "horizon_s", horizon_s),
        )
        self.admission = Admission(cache, programs)
        self.admit(num_again=again)

    def ask(self, num_expected: int) -> int:
        self.num_asked += 1
        return num_expected

    def admit(
        self,
        *,
        num_again: int = 0,
        num_new: int = 0,
        tenant: str = "t",
        wait_s: float = 0.0,
        priority: int = 0,
    ) -> None:
        """An agent's request, and then a step begins."""
        self.missed = num_again + num_new, num_again
        request: Any = Request(1, priority)
        self.admission.admitted(request, tenant, 0, wait_s)
        self.admission.step_starts()

    def must_wait(self, request: Any, num_cached: int = 0) -> bool:
        return self.admission.hold_s > 0 and self.admission.waits(request, Match(num_cached, None))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that shows `s`."""
    now = SimpleNamespace(s=101.0)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.mark.parametrize(
    ("engine", "request_", "num_cached", "waits"),
    [
        pytest.param({}, Request(400), 0, False, id="fits beside the expected contexts"),
        pytest.param({}, Request(401), 0, True, id="does not"),
        pytest.param({"num_expected": 99}, Request(1000), 499, True, id="less than half cached"),
        pytest.param({"num_expected": 99}, Request(1000), 500, False, id="half cached"),
        pytest.param({"again": 0}, Request(900), 0, False, id="nothing is computed again"),
        pytest.param({"num_expected": 10, "num_groups": 2}, Request(400), 0, False, id="2 groups"),
        pytest.param({"num_expected": 10, "num_groups": 2}, Request(410), 0, True, id="do not fit"),
    ],
)
def test_what_does_not_fit_beside_the_expected_contexts_waits(engine, request_, num_cached, waits):
    assert Engine(**engine).must_wait(request_, num_cached) == waits


def test_the_cache_is_asked_once_per_step_and_only_if_it_matters() -> None:
    busy = Engine()
    busy.must_wait(Request(1000), 900)
    assert busy.num_asked == 0
    for _ in range(3):
        busy.must_wait(Request(900))
    assert busy.num_asked == 1
    busy.admission.step_starts()
    busy.must_wait(Request(900))
    assert busy.num_asked == 2


def test_requests_wait_while_any_tenants_agents_compute_more_again_than_for_the_first_time() -> (
    None
):
    engine = Engine(again=0)
    steps = [
        ("a", 0, 600, False),
        ("a", 400, 0, False),
        ("a", 200, 0, True),
        ("b", 0, 9000, True),  # one tenant's new tokens hide nothing of another's
        ("a", 0, 300, True),
        ("a", 0, 900, False),
        ("b", 900, 0, False),
    ]
    for tenant, again, new, waits in steps:
        engine.admit(num_again=again, num_new=new, tenant=tenant)
        assert engine.must_wait(Request(900)) == waits
        assert (engine.horizon_s > 0) == waits


def test_a_few_evictions_make_nobody_wait() -> None:
    assert not Engine(again=CACHE // 10).must_wait(Request(900))


def test_requests_wait_for_longer_where_they_wait_anyway_but_not_for_more_than_a_minute(
    now,
) -> None:
    engine = Engine()
    assert engine.admission.hold_s == PAUSE_S
    engine.admit(num_again=CACHE, wait_s=40.0)
    assert engine.admission.hold_s == pytest.approx(40 * HOLD_PER_WAIT)
    now.s += 1000
    engine.admit(num_again=CACHE)
    engine.admit(num_again=CACHE)
    assert engine.admission.hold_s == PAUSE_S
    engine.admit(num_again=CACHE, wait_s=1000.0, priority=1)
    assert engine.admission.hold_s == PAUSE_S, "it may wait for as long as it likes"
    engine.admit(num_again=CACHE, wait_s=1000.0)
    assert engine.admission.hold_s == admission.MAX_HOLD_S


def test_the_gauges_say_since_when_and_why(now) -> None:
    engine = Engine()
    engine.admit(num_again=50, num_new=1000)
    now.s += 7
    gauges = engine.admission.gauges(num_held=3)
    assert (gauges.held, gauges.holding_s, gauges.hold_s) == (3, 7.0, PAUSE_S)
    assert gauges.recomputed_tokens == CACHE + 50
    assert 0.5 < gauges.again_per_new < 1
    now.s += admission.MAX_HOLD_S
    gauges = engine.admission.gauges(num_held=3)
    assert (gauges.held, gauges.holding_s, gauges.hold_s) == (0, 0.0, 0.0)
    engine.admission.step_starts()
    assert not engine.must_wait(Request(900))
