"""The graph of a program as requests carry it: what is sent, what is read, and what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.protocol.step_graph import (
    MAX_GRAPH_CHARS,
    MAX_STEPS,
    Step,
    StepGraph,
    StepName,
    read_graph,
    read_step_name,
)


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 12))):
        earlier = st.integers(0, index - 1) if index else st.nothing()
        after = draw(st.none() | earlier)
        tool = draw(st.none() | st.text(max_size=20))
        waits_for = st.lists(earlier, max_size=3, unique=True) if index else st.just([])
        steps.append(Step(after, tool, tuple(draw(waits_for))))
    return StepGraph(tuple(steps))


@given(graphs())
def test_a_graph_that_is_written_is_read_again(graph: StepGraph) -> None:
    found = read_graph(graph.text)
    assert found == graph and found.digest == graph.digest
    assert json.loads(graph.text)[0].get("after") is None


def test_a_client_can_compute_the_digest_itself() -> None:
    graph = StepGraph((Step(), Step(0, "search")))
    assert graph.text == '[{},{"after":0,"tool":"search"}]'
    assert graph.digest == hashlib.sha256(graph.text.encode()).hexdigest()[:16]


@given(st.integers(0, MAX_STEPS - 1))
def test_the_name_of_a_step_that_is_written_is_read_again(index: int) -> None:
    name = StepName("0123456789abcdef", index)
    assert read_step_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, "", "/", "0123456789abcdef", "0123456789abcdef/", "short/1"),
        *("0123456789abcdef/-1", "0123456789abcdef/1e3", "0123456789abcdef/٣"),
        "0123456789abcdef/" + "1" * 1000,
    ],
)
def test_what_is_not_the_name_of_a_step_is_none(text: object) -> None:
    assert read_step_name(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "[1]", "not JSON", "[" * 10_000, '[{"after": 0}]', '[{}, {"after": 1}]'),
        *('[{}, {"after": true}]', '[{}, {"after": -1}]', '[{}, {"after": 0.0}]'),
        *('[{}, {"waits_for": 0}]', '[{}, {"waits_for": [1]}]', '[{}, {"waits_for": ["0"]}]'),
        *('[{"tool": "\\ud800"}]', "[\ud800]", '[{}, {"after": 1e400}]', "[{}]\u00e9"),
        *('[{"tool": 3}]', json.dumps([{"tool": "x" * 257}]), json.dumps([{}] * (MAX_STEPS + 1))),
        json.dumps([{"tool": "x" * 256}] * 64) + " " * MAX_GRAPH_CHARS,
    ],
)
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"step|graph"):
        read_graph(text)
    assert len(read_graph(json.dumps([{}] * MAX_STEPS)).steps) == MAX_STEPS


def test_steps_that_extend_the_same_are_branches_of_a_fork() -> None:
    graph = StepGraph((Step(), Step(), Step(0), Step(0), Step(2), Step(2, None, (3,)), Step(5)))
    assert [graph.fork_of(index) for index in range(7)] == [0, 0, 2, 2, 4, 4, None]


def test_the_tool_of_a_step_is_the_first_that_runs_before_a_step_after_it() -> None:
    graph = StepGraph((Step(), Step(0, "search"), Step(0, "read"), Step(2), Step(1, "look")))
    assert [graph.next_tool(index) for index in range(5)] == ["search", "look", None, None, None]
    # A step that another continues at once is in no tool.
    assert StepGraph((Step(), Step(0, "search"), Step(0))).next_tool(0) is None
    joined = StepGraph((Step(), Step(0, "search"), Step(0, None, (1,))))
    assert joined.next_tool(0) == "search", "the last waits for what runs after the tool"
