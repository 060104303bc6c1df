"""`benchmarks.session_model` and `benchmarks.sessions`: what sessions are like, and as a trace."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any  # Any: attributes of a step

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import session_model, sessions
from benchmarks.session_model import AGENTS, Distribution, Session, Step, as_calls, draw_session
from benchmarks.traces import Trace

SEEDS = st.integers(0, 1 << 32)


def drawn(seed: int, num_sessions: int = 1) -> list[Session]:
    rng = np.random.default_rng(seed)
    return [draw_session(rng) for _ in range(num_sessions)]


def step(trigger: session_model.Trigger, continues: int | None, **changes: Any) -> Step:
    usual = Step(
        trigger,
        continues,
        reads=(),
        after=(),
        pauses_s=(),
        num_new=10,
        num_prompt=100,
        num_output=5,
    )
    return replace(usual, **changes)


# Two requests with a tool and a subagent in the first, and a compaction before the second.
BY_HAND = Session(
    AGENTS[0],
    num_project_tokens=7,
    steps=(
        step("user", None, num_new=20, num_prompt=22_027, num_output=3),
        step("subagent", None, after=(0,), num_prompt=22_017, num_output=40),
        step("tool", 0, reads=(1,), after=(0, 1), pauses_s=(0.5, 2.0), num_prompt=22_080),
        step("compaction", 2, after=(2,), num_prompt=22_095, num_output=9),
        step("user", None, reads=(3,), after=(3,), pauses_s=(60.0,), num_prompt=22_026),
    ),
)


# -- what is drawn --------------------------------------------------------------------------------


def test_a_distribution_has_the_quantiles_it_is_given_and_ends_where_it_is_told() -> None:
    quantiles = ((0.25, 3.0), (0.5, 10.0), (0.9, 1000.0))
    values = Distribution(*quantiles, most=5000.0).draw(np.random.default_rng(0), 40_000)
    for share, value in quantiles:
        assert (values < value).mean() == pytest.approx(share, abs=0.01)
    assert values.max() == 5000.0
    assert 0.02 < (values == 5000.0).mean() < 0.08  # log-normal on: z = 1.28 * (1 + 1.61 / 4.61)


def test_many_sessions_have_what_is_published() -> None:
    some = drawn(0, 1200)
    requests = [sum(one.trigger == "user" for one in session.steps) for session in some]
    steps = [one for session in some for one in session.steps]
    compactions = np.array(
        [sum(one.trigger == "compaction" for one in session.steps) for session in some]
    )
    human_waits_s = [w for one in steps if one.trigger == "user" for w in one.pauses_s]
    latencies_s = [w for one in steps if one.trigger == "tool" for w in one.pauses_s]
    assert np.mean(requests) == pytest.approx(9.2, rel=0.25)
    assert np.mean(np.array(requests) == 1) == pytest.approx(0.585, abs=0.04)
    assert np.median([one.num_output for one in steps]) == pytest.approx(220, rel=0.15)
    assert np.quantile(latencies_s, [0.5, 0.9]) == pytest.approx([0.3, 13.6], rel=0.1)
    assert np.quantile(human_waits_s, [0.5, 0.9]) == pytest.approx([86, 1260], rel=0.15)
    assert (compactions > 0).mean() == pytest.approx(0.097, abs=0.03)
    assert compactions[compactions > 0].mean() == pytest.approx(3.7, rel=0.3)
    with_subagent = [any(one.trigger == "subagent" for one in session.steps) for session in some]
    assert np.mean(with_subagent) == pytest.approx(0.44, abs=0.04)

    for figure in sessions.compare(sessions.sample(some)):
        assert 0.65 < figure.ratio < 1.5, figure


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_a_session_is_in_order_and_no_context_outgrows_its_window(seed: int) -> None:
    (session,) = drawn(seed)
    window = max(size for size, _ in session.agent.windows)
    for index, one in enumerate(session.steps):
        assert all(before < index for before in one.after)
        assert set(one.reads) <= set(one.after)
        assert one.continues is None or one.continues in one.after
        is_small = one.num_prompt <= window or one.trigger == "compaction"
        assert is_small or one.continues is None  # what one step adds can be too much alone
    assert session.steps[0].trigger == "user"
    ends = [one.continues for one in session.steps if one.continues is not None]
    assert len(ends) == len(set(ends))  # a context goes on from its last step


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_what_a_subagent_found_is_read_once_and_later(seed: int) -> None:
    (session,) = drawn(seed)
    steps = session.steps
    context: dict[int, int] = {}  # of each step, the step that its context begins with
    for index, one in enumerate(steps):
        context[index] = index if one.continues is None else context[one.continues]
    firsts = [index for index, one in enumerate(steps) if one.trigger == "subagent"]
    last = {context[index]: index for index in context}  # dicts keep the last value of a key
    readers = [index for one in steps for index in one.reads]
    for first in firsts:
        assert readers.count(last[first]) == 1 or steps[last[first]].trigger == "compaction"


# -- tokens ---------------------------------------------------------------------------------------


def begins_with(tokens: np.ndarray, *parts: np.ndarray) -> bool:
    expected = np.concatenate(parts)
    return len(tokens) > len(expected) and bool((tokens[: len(expected)] == expected).all())


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_a_prompt_begins_with_the_prompt_and_answer_before_but_after_a_compaction(
    seed: int,
) -> None:
    (session,) = drawn(seed)
    opening = np.arange(50, dtype=np.int32)
    calls = as_calls(session, opening, np.random.default_rng(seed), Fraction(1, 64))
    first = calls[0].prompt
    num_project = max(1, round(session.num_project_tokens / 64))
    project = first[len(opening) : len(opening) + num_project]
    for one, call in zip(session.steps, calls, strict=True):
        read = [calls[index].reply for index in one.reads]
        if one.continues is None:
            assert begins_with(call.prompt, opening, project, *read)
        else:
            before = calls[one.continues]
            assert begins_with(call.prompt, before.prompt, before.reply, *read)
    for one, following in itertools.pairwise(session.steps):
        assert (one.trigger == "compaction") == (
            following.continues is None and following.trigger in ("user", "tool")
        )


def test_at_full_scale_calls_are_as_long_as_their_steps() -> None:
    opening = np.zeros(22_000, dtype=np.int32)
    calls = as_calls(BY_HAND, opening, np.random.default_rng(0), Fraction(1))
    assert [len(call.prompt) for call in calls] == [one.num_prompt for one in BY_HAND.steps]
    assert [len(call.reply) for call in calls] == [3, 40, 5, 9, 5]
    assert [call.think_s for call in calls] == [0.0, 0.0, 2.0, 0.0, 60.0]
    assert [call.after for call in calls] == [(), (0,), (0, 1), (2,), (3,)]


def tokens_of(trace: Trace) -> list[bytes]:
    return [call.prompt.tobytes() + call.reply.tobytes() for call in trace.calls()]


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    first, again, other = (session_model.trace(60, seed, Fraction(1, 64)) for seed in (0, 0, 1))
    assert tokens_of(first) == tokens_of(again)
    assert [one.arrival_s for one in first.programs] == [one.arrival_s for one in again.programs]
    assert tokens_of(first) != tokens_of(other)


def test_a_trace_is_what_falls_into_its_window_and_sessions_share_their_agents_opening() -> None:
    scale = Fraction(1, 32)
    trace = session_model.trace(150, 0, scale)
    window_s = 150 / session_model.STEPS_PER_S / 32
    assert trace.is_timed
    assert all(0 <= (one.arrival_s or 0) < window_s for one in trace.programs)
    assert 150 <= trace.num_calls < 300
    for program in trace.programs:
        assert all(before < i for i, call in enumerate(program.calls) for before in call.after)
        assert (
            sum(call.think_s for call in program.calls[1:] if len(call.after) == 1) < 2 * window_s
        )
    openings = {program.calls[0].prompt[: 14_000 // 32].tobytes() for program in trace.programs}
    assert 1 <= len(openings) <= len(AGENTS) < len(trace.programs)


# -- the fit --------------------------------------------------------------------------------------


def test_a_session_made_by_hand_is_counted_right() -> None:
    values = sessions.sample([BY_HAND])
    assert values[sessions.REQUESTS].tolist() == [2]
    assert values[sessions.TOOL_STEPS].tolist() == [1]
    assert values[sessions.LATENCY].tolist() == [0.5, 2.0]
    assert values[sessions.HUMAN_WAIT].tolist() == [60.0]
    assert values[sessions.PREFIX.format("A")].tolist() == [22_027, 22_080]
    assert values[sessions.APPENDED.format("A")].tolist() == [53, 15]
    assert values[sessions.COMPACTIONS].tolist() == [1]
    assert values[sessions.IN_LOOP].tolist() == [0]
    assert values[sessions.HAS_SUBAGENT].tolist() == [1]
    assert values[sessions.TOOLS].tolist() == [0, 0, 2, 0, 0]
    assert values[sessions.PREFIX.format("B")].tolist() == []


def test_statistics_are_read_from_their_names() -> None:
    values = np.arange(1, 102).astype(np.float64)
    names = ("mean", "p25", "p99", "< 11")
    assert [sessions.statistic(values, name) for name in names] == pytest.approx(
        [51.0, 26.0, 100.0, 10 / 101]
    )


def test_the_command_compares_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    words = f"--sessions 150 --json {tmp_path}/fit.json --plot {tmp_path}/fit.svg"
    assert sessions.main(words.split()) == 0
    assert "user requests of a session" in capsys.readouterr().out
    figures = json.loads((tmp_path / "fit.json").read_text())["figures"]
    (share,) = [one for one in figures if one["quantity"] == sessions.HAS_SUBAGENT]
    assert share["published"] == 0.44
    assert 0.3 < share["sampled"] < 0.6
    assert "sampled, agent A" in (tmp_path / "fit.svg").read_text()


@pytest.mark.parametrize("words", ["--plot fit.gif", "--sessions 99", "--sessions 100 --json no/x"])
def test_a_mistake_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sessions.main(words.split())
    assert "error" in capsys.readouterr().err
