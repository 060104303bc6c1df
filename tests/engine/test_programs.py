"""Rule 4 over random programs: chats, forks, joins, bursts, aborts, every kind of request, in
caches that hold hardly more than the longest of them.

`make soak` plays many more of them, in random settings.
"""

from __future__ import annotations

import pytest

from tests.effort import requests
from tests.engine.engine import Engine
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import (
    NEAR_TIE,
    REFERENCE,
    Hang,
    Played,
    References,
    Setting,
    differences,
    play,
)
from tests.engine.programs import Abort, random_program
from tests.engine.ties import JUDGE, gap

PROGRAMS = [random_program(seed, num_calls=requests(80)) for seed in (1, 2)]

SETTINGS = {
    "stock": Setting(None, num_blocks=40),
    "tiny cache": Setting({}, num_blocks=26),
    "prefill in chunks, in order of arrival": Setting(
        {"schedule_policy": "fcfs", "schedule_max_overtakes": 0},
        num_blocks=36,
        max_num_batched_tokens=64,
    ),
    "prefill in one": Setting({}, block_size=64, num_blocks=16, chunked=False),
    "block 128": Setting({}, block_size=128, num_blocks=8, max_num_batched_tokens=256),
    "few at once, depth first": Setting(
        {"schedule_policy": "dfs-weight", "schedule_window": 3, "schedule_max_delay": 10.0},
        num_blocks=60,
        max_num_seqs=4,
        grammars_in_background=True,
    ),
    "by priority": Setting(
        {"schedule_max_overtakes": 1, "schedule_fair_quantum": 300},
        num_blocks=30,
        policy="priority",
    ),
    "exact jumps, prefill in chunks, by what programs have left": Setting(
        {
            "jump_mode": "exact",
            "schedule_policy": "program",
            "schedule_hold_s": 1.0,
            "schedule_max_delay": 100.0,
        },
        num_blocks=30,
        max_num_batched_tokens=64,
    ),
    "fair, without jumps": Setting(
        {"jump_forward": False, "schedule_fair_quantum": 100},
        num_blocks=30,
    ),
}


def start_for(start, setting: Setting) -> Engine:
    engine = start(plugin=setting.plugin, **setting.engine_args)
    setting.prepare(engine)
    return engine


@pytest.fixture(scope="module")
def references(start) -> list[References]:
    engine = start_for(start, REFERENCE)
    with decoding_one_by_one(engine.scheduler):
        narrowed = [play(engine, program, None, give_up=False) for program in PROGRAMS]
    stock = [
        play(engine, program, known.prompts, give_up=False)
        for program, known in zip(PROGRAMS, narrowed, strict=True)
    ]
    return [References(*both) for both in zip(narrowed, stock, strict=True)]


def check_answers(start, references: list[References], setting: Setting, got: list[Played]) -> None:
    """Fail on any difference but a near tie of two tokens."""
    found = [
        (program.seed, difference)
        for program, known, played in zip(PROGRAMS, references, got, strict=True)
        for difference in differences(program, known.expected_by(setting, program), played)
    ]
    if not found:
        return
    judge = start(**JUDGE)
    gaps = [gap(judge, difference) for _, difference in found]
    real = [
        f"seed {seed}, {setting}, logits {distance} apart\n{difference}"
        for (seed, difference), distance in zip(found, gaps, strict=True)
        if distance > NEAR_TIE
    ]
    assert not real, f"{len(real)} requests got another answer:\n" + "\n\n".join(real[:3])


def test_stock_without_a_cache_agrees_with_the_reference(start, references):
    """Which is the same but for the narrowed masks of constrained requests."""
    check_answers(start, references, REFERENCE, [known.stock for known in references])


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_request_gets_the_answer_it_gets_without_a_cache(start, references, setting):
    engine = start_for(start, setting)
    got = [
        play(engine, program, known.narrowed.prompts)
        for program, known in zip(PROGRAMS, references, strict=True)
    ]
    check_answers(start, references, setting, got)
    counts = got[0].counts + got[1].counts
    assert counts["aborts"] >= requests(10)
    if setting.plugin is not None:
        assert counts["partial hits"] > requests(20)
        assert counts["forced tokens"] > requests(50) or not setting.is_canonical


def test_the_programs_hold_every_shape_and_way_to_give_up():
    programs = [random_program(seed, num_calls=80) for seed in (1, 2)]
    calls = [call for program in programs for call in program.calls]
    assert {call.shape for call in calls} >= {
        *("question", "turn", "branch", "join", "burst", "long", "long again", "retry", "storm"),
        *("crowd", "standstill"),
    }
    aborts = {call.abort for call in calls}
    assert Abort(after_steps=0) in aborts and Abort(after_tokens=1) in aborts
    assert any(call.params.n > 1 for call in calls)
    assert random_program(1, num_calls=80) == programs[0]


def test_an_engine_that_gets_nowhere_is_a_failure_with_its_seed(start, monkeypatch):
    monkeypatch.setattr("tests.engine.play.HANG_S", 0.2)
    engine = start_for(start, Setting(None))
    schedule = engine.scheduler.schedule
    engine.scheduler.max_num_scheduled_tokens = 0
    with pytest.raises(Hang, match=r"seed 1.*waiting"):
        play(engine, PROGRAMS[0], None)
    assert engine.scheduler.schedule == schedule
