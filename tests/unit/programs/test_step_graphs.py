"""What a program still has to compute, by its graph and by what its steps took before."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.programs.step_graphs import MAX_GRAPHS, MEMORY, KnownStep, MeasuredGraph, StepGraphs
from sgl_vllm.protocol.hints import Hints
from sgl_vllm.protocol.step_graph import (
    Step,
    StepGraph,
    StepName,
    digest_of,
)

LINE = StepGraph((Step(), Step(0, "search"), Step(1, "read")))
FORK = StepGraph((Step(), Step(0), Step(0), Step(0, None, (1, 2)), Step()))
"""Two branches after the first step, which the fourth joins, and a context of its own."""


def hints_of(graph: StepGraph, index: int, *, sends_graph: bool = True) -> Hints:
    name = StepName(graph.digest, index)
    return Hints(step=name, graph=graph.text if sends_graph else None)


def measured(graph: StepGraph, num_tokens: Sequence[int]) -> MeasuredGraph:
    found = MeasuredGraph(graph)
    for index, num in enumerate(num_tokens):
        KnownStep(found, index).ended(num)
    return found


def test_nothing_is_expected_before_a_step_was_measured() -> None:
    graph = MeasuredGraph(LINE)
    assert KnownStep(graph, 0).remaining_tokens is None
    KnownStep(graph, 1).ended(40)
    assert KnownStep(graph, 0).remaining_tokens == 3 * 40, (
        "the others count as the mean of those measured"
    )


def test_what_a_step_took_long_ago_is_forgotten() -> None:
    last = KnownStep(measured(LINE, [1_000, 1_000, 1_000]), 2)
    for _ in range(20 * MEMORY):
        last.ended(10)
    assert 10 <= (last.remaining_tokens or 0) <= 11


def naive_remaining(steps: Sequence[Step], num_tokens: Sequence[int], index: int) -> int:
    before: set[int] = set()
    for _ in steps:
        before |= {need for step in (index, *before) for need in steps[step].needs}
    return sum(num for step, num in enumerate(num_tokens) if step not in before)


@given(st.data())
def test_the_remainder_is_what_a_walk_over_the_graph_finds(data: st.DataObject) -> None:
    num_steps = data.draw(st.integers(1, 10))
    earlier = [st.lists(st.integers(0, max(0, i - 1)), max_size=3 * (i > 0)) for i in range(10)]
    steps = tuple(Step(None, None, tuple(data.draw(earlier[i]))) for i in range(num_steps))
    num_tokens = data.draw(st.lists(st.integers(0, 99), min_size=num_steps, max_size=num_steps))
    graph = measured(StepGraph(steps), num_tokens)
    for index in range(num_steps):
        assert KnownStep(graph, index).remaining_tokens == naive_remaining(steps, num_tokens, index)


def test_a_digest_is_enough_once_the_graph_was_sent() -> None:
    graphs = StepGraphs()
    assert graphs.step_of("tenant", hints_of(LINE, 1, sends_graph=False)) is None
    sent = graphs.step_of("tenant", hints_of(LINE, 0))
    assert sent is not None and (sent.index, sent.next_tool) == (0, "search")
    sent.ended(70)
    later = graphs.step_of("tenant", hints_of(LINE, 1, sends_graph=False))
    assert later == KnownStep(sent.graph, 1)
    again = graphs.step_of("tenant", hints_of(LINE, 0))
    assert again is not None and again.remaining_tokens == 3 * 70, "what was measured is kept"


@pytest.mark.parametrize("hints", [Hints(), Hints("p"), hints_of(LINE, 3), hints_of(LINE, 127)])
def test_what_is_no_step_of_a_graph_is_not_known(hints: Hints) -> None:
    graphs = StepGraphs()
    graphs.step_of("tenant", hints_of(LINE, 0))
    assert graphs.step_of("tenant", hints) is None


def test_each_tenant_has_its_own_graphs() -> None:
    graphs = StepGraphs()
    mine = graphs.step_of("me", hints_of(LINE, 0))
    assert mine is not None
    mine.ended(1_000_000)
    assert graphs.step_of("you", hints_of(LINE, 0, sends_graph=False)) is None
    yours = graphs.step_of("you", hints_of(LINE, 0))
    assert yours is not None and yours.remaining_tokens is None


def test_a_graph_under_another_digest_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    graphs = StepGraphs()
    with caplog.at_level(logging.WARNING):
        assert graphs.step_of("me", Hints(step=StepName(FORK.digest, 0), graph=LINE.text)) is None
    assert len(graphs) == 0 and "sgl_graph is ignored" in caplog.text


@pytest.mark.parametrize("text", ['[{"after": "secret"}]', '[{"tool": "\\ud800 secret"}]'])
def test_a_text_that_is_no_graph_is_read_once_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, hints = StepGraphs(), Hints(step=StepName(digest_of(text), 0), graph=text)
    with caplog.at_level(logging.WARNING):
        assert [graphs.step_of("me", hints) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1 and "secret" not in caplog.text


def test_a_tenant_with_many_graphs_loses_its_own() -> None:
    graphs = StepGraphs()
    graphs.step_of("me", hints_of(LINE, 0))
    for number in range(3 * MAX_GRAPHS):
        graphs.step_of("you", hints_of(StepGraph((Step(), Step(0, f"tool {number}"))), 0))
    assert len(graphs) == MAX_GRAPHS
    assert graphs.step_of("me", hints_of(LINE, 1, sends_graph=False)) is not None
