"""The measurement at a GPU's pace: its smallest run as a gate, the runner, the virtual clock."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

import numpy as np

from benchmarks.pace.__main__ import WORKLOADS, main
from benchmarks.pace.devices import FULL, NONE, PIECEWISE, Clock, Device
from benchmarks.pace.measure import Setup, step_cost
from benchmarks.pace.runner import Runner, Text
from benchmarks.pace.vocabulary import DEMO, Vocabulary, vocabulary

MOST_OF_STOCK = 1.25
"""Processor time of a decoding step with the plugin over stock's: 0.8 on a quiet machine."""

AT_MOST = {
    "decoding": {"passes": 128, "piecewise": 0},
    "chats": {"passes": 24, "piecewise": 3},
    "json_schema": {"passes": 51, "piecewise": 15},
    "json_regex": {"passes": 34, "piecewise": 24},
    "tool_calls": {"passes": 81, "piecewise": 42},
}
"""Of the plugin, for four programs at a time. Counts do not vary: lower them when they fall."""


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return vocabulary(DEMO)


# -- the smallest run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the printed text of one run. The run silences vLLM's log, so the log level is
    restored."""
    file = tmp_path_factory.mktemp("pace") / "pace.json"
    logger = logging.getLogger("vllm")
    level = logger.level
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--quick", "--json", str(file)]) == 0
    logger.setLevel(level)
    return json.loads(file.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def measured(quick_run: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return quick_run[0]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_plugin_takes_no_more_passes_than_recorded(
    measured: dict[str, Any], workload: str
) -> None:
    (run,) = (one for one in measured["modelled"] if one["workload"] == workload)
    plugin, stock = run["arms"]["sgl"], run["arms"]["stock"]
    more = {name: plugin[name] for name, most in AT_MOST[workload].items() if plugin[name] > most}
    assert not more
    assert plugin["programs"] == stock["programs"] == 4
    assert plugin["added"] == stock["added"]  # a jump adds no row
    assert plugin["computed_tokens"] <= stock["computed_tokens"]


def test_every_part_of_a_step_is_timed(measured: dict[str, Any]) -> None:
    for cost in measured["processor_time"]:
        parts = cost["arms"]["sgl"]["parts_us"]
        assert parts.keys() == {"schedule", "bitmask", "update", "jump"}
        assert min(parts.values()) > 0
        assert parts["jump"] < cost["arms"]["sgl"]["step_us"]


def test_a_decoding_step_costs_about_what_stocks_costs(words: Vocabulary) -> None:
    cost = step_cost(Setup(words, {}), "decoding", 16, rounds=12, advance=lambda: None)
    assert cost.step.median < MOST_OF_STOCK


# -- the runner -----------------------------------------------------------------------------------


def step(tokens: dict[str, int], *, new: tuple[Any, ...] = (), **more: Any) -> Any:
    """What a scheduler sends: the number of tokens of each request."""
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_new_reqs=new,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        **more,
    )


def new_request(
    name: str, prompt: list[int], output: tuple[int, ...] = (), computed: int = 0
) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=prompt,
        prefill_token_ids=[*prompt, *output],
        num_computed_tokens=computed,
    )


def all_legal(name: str, size: int) -> Any:
    mask = np.full((1, -(-size // 32)), -1, np.int32)
    return SimpleNamespace(structured_output_request_ids=[name], grammar_bitmask=mask)


def run(runner: Runner, scheduled: Any) -> str:
    """The graph of a pass."""
    before = dict(runner.counts.passes)
    runner.execute_model(scheduled)
    (graph,) = (name for name, count in runner.counts.passes.items() if count > before[name])
    return graph


PROMPT = list(range(20, 50))


def decoding(words: Vocabulary, longest_query: int = 1) -> Runner:
    """A runner with a row whose prompt of 30 tokens is computed."""
    runner = Runner(words, Clock(), {}, longest_query=longest_query)
    assert run(runner, step({"a": 30}, new=(new_request("a", PROMPT),))) == PIECEWISE
    runner.sample_tokens(None)
    return runner


def test_a_batch_that_decodes_runs_in_a_full_graph(words: Vocabulary) -> None:
    assert run(decoding(words), step({"a": 1})) == FULL


def test_a_prompt_of_more_tokens_than_any_graph_runs_in_none(words: Vocabulary) -> None:
    prompt = [20] * 600
    assert run(decoding(words), step({"a": 1, "b": 600}, new=(new_request("b", prompt),))) == NONE


def test_a_request_that_is_added_again_is_prefill(words: Vocabulary) -> None:
    runner = decoding(words, longest_query=16)
    resumed = new_request("a", PROMPT, output=(60, 61, 62), computed=31)
    assert run(runner, step({"a": 2}, new=(resumed,))) == PIECEWISE
    assert runner.counts.added == 2


@pytest.mark.parametrize(("longest_query", "graph"), [(1, PIECEWISE), (4, FULL), (2, PIECEWISE)])
def test_a_jump_in_place_is_a_decoding_row_where_graphs_take_its_length(
    words: Vocabulary, longest_query: int, graph: str
) -> None:
    runner = decoding(words, longest_query)
    forced = {"a": SimpleNamespace(start=31, tokens=[61, 62])}
    assert run(runner, step({"a": 3}, sgl_forced=forced)) == graph
    assert runner.counts.added == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_the_text_goes_on_after_a_jump(words: Vocabulary, in_place: bool) -> None:
    pieces = words.tokens('{"name": "Harry"}')
    runner = Runner(words, Clock(), {"a": Text('{"name": "Harry"}', words)})
    legal = all_legal("a", words.size)
    run(runner, step({"a": 30}, new=(new_request("a", PROMPT),)))
    assert runner.sample_tokens(legal).result().sampled_token_ids == [[pieces[0]]]
    run(runner, step({"a": 1}))
    runner.sample_tokens(legal)  # a sample that the jump makes stale
    if in_place:
        forced = {"a": SimpleNamespace(start=31, tokens=pieces[1:4])}
        run(runner, step({"a": 3}, sgl_forced=forced))
    else:
        resumed = new_request("a", PROMPT, output=tuple(pieces[:4]), computed=31)
        run(runner, step({"a": 3}, new=(resumed,)))
    assert runner.sample_tokens(legal).result().sampled_token_ids == [[pieces[4]]]


# -- the clock ------------------------------------------------------------------------------------

DEVICE = Device(
    weights_s=4.0,
    token_s=0.5,
    source="",
    piecewise_s=1.0,
    sampling_s=0.25,
    launch_full_s=1.0,
    launch_piecewise_s=5.0,
    launch_sampling_s=0.5,
    add_s=2.0,
)


def waited_s(clock: Clock, graph: str, num_tokens: int, num_added: int) -> float:
    """When the result of a pass is there that is launched at 0."""
    clock.launch(DEVICE, graph, num_tokens, num_added)
    future = clock.sample(DEVICE)
    future.set_result(None)
    future.result()
    return round(clock.now_s, 3)


@pytest.mark.parametrize(
    ("graph", "num_tokens", "num_added", "seconds"),
    [
        (FULL, 4, 0, 1 + 4 + 0.25),
        (FULL, 20, 0, 1 + 10 + 0.25),  # bound by compute
        (PIECEWISE, 4, 0, 2 + 5 + 0.25),  # the device starts when 40 % is launched
        (PIECEWISE, 4, 1, 7 * 0.4 + 5 + 0.25),
    ],
)
def test_a_pass_ends_when_it_is_launched_computed_and_sampled(
    graph: str, num_tokens: int, num_added: int, seconds: float
) -> None:
    assert waited_s(Clock(), graph, num_tokens, num_added) == pytest.approx(seconds, abs=0.001)


def test_a_second_pass_waits_for_the_device() -> None:
    clock = Clock()
    clock.launch(DEVICE, FULL, 1, 0)
    assert waited_s(clock, FULL, 1, 0) == pytest.approx(1 + 4 + 4 + 0.25, abs=0.001)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--workloads", "chess"], ["--batches", "0"], ["--json", "/no/such/folder/f"]]
)
def test_a_mistaken_argument_is_an_error_of_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_what_is_modelled_is_called_so(quick_run: tuple[dict[str, Any], str]) -> None:
    measured, _, modelled = quick_run[1].partition("MODELLED: programs per second\n")
    assert "programs/s" in modelled
    assert "programs/s" not in measured
