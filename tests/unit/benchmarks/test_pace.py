"""The measurement at a GPU's pace: its smallest run as a gate, and the graphs of the runner."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")
from benchmarks.pace import measure
from benchmarks.pace.__main__ import WORKLOADS, main
from benchmarks.pace.devices import FULL, NONE, PIECEWISE, Clock
from benchmarks.pace.measure import Setup, step_cost
from benchmarks.pace.runner import Runner
from benchmarks.pace.workloads import DEMO

MOST_OF_STOCK = 1.25
"""Processor time of a decoding step with the plugin over stock's: 0.8 on a quiet machine."""

AT_MOST = {
    "decoding": {"passes": 128, "piecewise": 0},
    "chats": {"passes": 24, "piecewise": 3},
    "json_schema": {"passes": 50, "piecewise": 16},
    "json_regex": {"passes": 34, "piecewise": 24},
    "tool_calls": {"passes": 81, "piecewise": 42},
}
"""Of the plugin, for four programs at a time. Counts do not vary: lower them when they fall."""


# -- the smallest run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run, which silences vLLM's log: its level is restored. That no garbage is
    collected in between changes no count, and saves most of the time."""
    file = tmp_path_factory.mktemp("pace") / "pace.json"
    logger = logging.getLogger("vllm")
    level = logger.level
    without_gc = mock.patch.multiple(measure, _freeze_heap=lambda: None, gc=mock.DEFAULT)
    with (
        mock.patch.dict(os.environ),
        without_gc,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        assert main(["--quick", "--rounds", "1", "--json", str(file)]) == 0
    logger.setLevel(level)
    times, _, modelled = printed.getvalue().partition("MODELLED: programs per second\n")
    assert "programs/s" in modelled
    assert "programs/s" not in times
    return json.loads(file.read_text())


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
    for case in measured["processor_time"]:
        times = case["arms"]["sgl"]
        schedule, bitmask, update, jump = (
            times[f"{part}_us"] for part in ("schedule", "bitmask", "update", "jump")
        )
        assert min(schedule, bitmask, update) > 0
        assert 0 < jump < times["step_us"]


def test_a_decoding_step_costs_about_what_stocks_costs() -> None:
    case = step_cost(Setup(DEMO, {}), "decoding", 16, rounds=12, advance=lambda: None)
    assert case.arms["sgl"]["step_ratio"] < MOST_OF_STOCK


# -- the runner -----------------------------------------------------------------------------------


def step(tokens: dict[str, int], *, new: tuple[Any, ...] = (), **more: Any) -> Any:
    """What a scheduler sends: the number of tokens of each request."""
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_new_reqs=new,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        **{"kv_cache_block_copies": None, **more},
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


class Counting(Runner):
    """One whose counts a test reads."""

    def __init__(self, longest_query: int) -> None:
        self.counts: Counter[str] = Counter()
        super().__init__(DEMO, Clock(), {}, self.counts, longest_query=longest_query)

    def graph_of(self, scheduled: Any) -> str:
        """The graph of a pass."""
        before = self.counts.copy()
        self.execute_model(scheduled)
        (graph,) = {FULL, PIECEWISE, NONE} & set(self.counts - before)
        return graph


PROMPT = list(range(20, 50))


def decoding(longest_query: int = 1) -> Counting:
    """A runner with a row whose prompt of 30 tokens is computed."""
    runner = Counting(longest_query)
    assert runner.graph_of(step({"a": 30}, new=(new_request("a", PROMPT),))) == PIECEWISE
    runner.sample_tokens(None)
    return runner


def test_a_batch_that_decodes_runs_in_a_full_graph() -> None:
    assert decoding().graph_of(step({"a": 1})) == FULL


def test_a_prompt_of_more_tokens_than_any_graph_runs_in_none() -> None:
    long = new_request("b", [20] * 600)
    assert decoding().graph_of(step({"a": 1, "b": 600}, new=(long,))) == NONE


def test_a_preempted_request_is_prefill_again() -> None:
    runner = decoding(longest_query=16)
    resumed = new_request("a", PROMPT, output=(60, 61, 62), computed=31)
    assert runner.graph_of(step({"a": 2}, new=(resumed,))) == PIECEWISE
    assert runner.counts["added"] == 2


@pytest.mark.parametrize(("longest_query", "graph"), [(1, PIECEWISE), (4, FULL), (2, PIECEWISE)])
def test_a_jump_is_a_decoding_row_where_graphs_take_its_length(
    longest_query: int, graph: str
) -> None:
    runner = decoding(longest_query)
    forced = {"a": SimpleNamespace(start=31, tokens=[61, 62])}
    assert runner.graph_of(step({"a": 3}, sgl_forced=forced)) == graph
    assert runner.counts["added"] == 1


def test_copied_blocks_are_counted() -> None:
    runner = decoding()
    runner.graph_of(step({"a": 1}, kv_cache_block_copies=[(1, 2), (3, 4)]))
    assert runner.counts["copies"] == 2
