"""Two runs beside each other: numbers, tables and JSON, from results made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.comparison import (
    Combination,
    Comparison,
    Result,
    as_document,
    grid_table,
    table,
)
from benchmarks.cost_model import CostModel
from benchmarks.traces import Call, Program, Reuse, Trace
from tools.engine_harness.settings import SGL, STOCK, EngineSettings

CALL = Call(np.arange(100, dtype=np.int32), np.arange(10, dtype=np.int32))
TRACE = Trace("by hand", tuple(Program((CALL,)) for _ in range(3)))
REUSE = Reuse(prompt_tokens=300, must_compute_tokens=60, working_set_tokens=1600)


def result(
    waits_s: dict[str, float],
    hit_rate: float = 0.5,
    ttft_p99_s: float = 2.0,
    times_s: tuple[float, ...] = (2.0, 8.0, 3.0),
) -> Result:
    return Result(
        hit_rate=hit_rate,
        ttft_mean_s=0.5,
        ttft_p50_s=0.25,
        ttft_p99_s=ttft_p99_s,
        ttft_p999_s=4.0,
        max_wait_s=max(waits_s.values()),
        max_passes=7,
        computed_prompt_tokens=150,
        cached_prompt_tokens=150,
        prompt_tokens=300,
        throughput_requests_s=10.0,
        requests=3,
        steps=40,
        preemptions=0,
        copied_blocks=0,
        step_cpu_us_mean=50.0,
        parts={},
        waits_s=waits_s,
        program_times_s=dict(enumerate(times_s)),
    )


def comparison(
    *arms: str,
    policy: str = "lpm",
    cache_fraction: float = 0.5,
    load: float | None = 0.8,
    sgl_waits_s: dict[str, float] | None = None,
    with_slowdown: bool = False,
) -> Comparison:
    waits_s = sgl_waits_s or {"0.0": 3.5, "1.0": 0.5, "2.0": 0.25}
    results = {
        STOCK: result({"0.0": 1.0, "1.0": 5.0, "2.0": 0.0}),
        SGL: result(waits_s, 0.6, 1.0, (2.0, 4.0, 3.0)),
    }
    return Comparison(
        Combination(policy, None, cache_fraction, load),
        EngineSettings(num_blocks=int(100 * cache_fraction), block_size=16, max_model_len=111),
        REUSE,
        None if load is not None else 32,
        {arm: results[arm] for arm in arms or (STOCK, SGL)},
        starved_s=2.0,
        alone=result(waits_s, times_s=(1.0, 2.0, 3.0)) if with_slowdown else None,
    )


def test_the_most_extra_wait_is_of_one_call_not_of_the_longest_waits() -> None:
    assert comparison().max_extra_wait_s == 2.5  # 3.5 s instead of 1; the longest: 3.5 to 5


def test_no_extra_wait_is_zero_and_of_one_arm_there_is_none() -> None:
    assert comparison(sgl_waits_s={"0.0": 0.5, "1.0": 0.5, "2.0": 0.0}).max_extra_wait_s == 0
    assert comparison(SGL).max_extra_wait_s is None
    assert "max_extra_wait_s" not in comparison(SGL).numbers(SGL)


def test_numbers_of_an_arm_are_plain_and_hold_no_list_of_calls() -> None:
    both = comparison()
    assert "waits_s" not in both.numbers(SGL)
    assert both.numbers(SGL)["max_extra_wait_s"] == 2.5
    assert "max_extra_wait_s" not in both.numbers(STOCK)
    assert both.numbers(STOCK)["best_hit_rate"] == 0.8
    json.dumps(both.numbers(SGL))


def test_programs_have_times_and_slowdowns_each_against_itself_alone() -> None:
    """The times are 2, 8 and 3 s with stock and 2, 4 and 3 s with the plugin; alone 1, 2 and 3."""
    both = comparison(with_slowdown=True)
    stock, sgl = both.numbers(STOCK), both.numbers(SGL)
    assert (stock["program_time_p50_s"], stock["program_time_p99_s"]) == (3.0, 8.0)
    assert (stock["slowdown_p50"], stock["slowdown_p90"]) == (2.0, 4.0)
    assert (sgl["slowdown_p50"], sgl["slowdown_p90"]) == (2.0, 2.0)
    assert both.ratio("slowdown_p90", -1) == 2.0
    assert both.ratio("program_time_p90_s", -1) == 2.0
    assert "slowdown_p50" not in comparison().numbers(STOCK)
    assert comparison().ratio("slowdown_p50", -1) is None


def test_what_is_computed_again_is_what_is_not_new() -> None:
    assert comparison().numbers(STOCK)["recomputed_prompt_tokens"] == 150 - 60


def test_a_program_is_starved_if_one_of_its_calls_waited_too_long() -> None:
    waits_s = {"0.0": 0.1, "0.1": 3.0, "0.2": 9.0, "1.0": 2.0, "2.0": 2.5}
    assert comparison(sgl_waits_s=waits_s).numbers(SGL)["starved_programs"] == 2  # 0 and 2


def test_a_ratio_above_one_is_better_for_the_plugin_whichever_way_is_better() -> None:
    assert comparison().ratio("hit_rate", 1) == pytest.approx(1.2)
    assert comparison().ratio("ttft_p99_s", -1) == pytest.approx(2.0)
    assert comparison().ratio("max_passes", 0) is None
    assert comparison(STOCK).ratio("hit_rate", 1) is None


def test_the_table_has_the_extra_wait_beside_the_plugins_longest() -> None:
    lines = table(TRACE, comparison()).splitlines()
    (line,) = [line for line in lines if line.startswith("most extra wait")]
    assert line.split()[-1] == "2.500"
    assert "extra wait" not in table(TRACE, comparison(SGL))


def test_the_grid_has_a_row_for_every_combination_under_columns_that_line_up() -> None:
    grid = [
        comparison(policy=policy, cache_fraction=fraction)
        for fraction in (0.25, 0.5)
        for policy in ("lpm", "dfs-weight")
    ]
    lines = grid_table(TRACE, grid).splitlines()
    rows = [line for line in lines if "lpm" in line or "dfs-weight" in line]
    assert [row.split()[:3] for row in rows] == [
        ["0.25", "0.8", "lpm"],
        ["0.25", "0.8", "dfs-weight"],
        ["0.5", "0.8", "lpm"],
        ["0.5", "0.8", "dfs-weight"],
    ]
    heading = next(line for line in lines if line.lstrip().startswith("cache  "))
    assert len({len(row) for row in rows} | {len(heading)}) == 1
    numbers = " ".join(rows[0].split()[3:])
    assert numbers == "0.5000 0.6000 1.000x 1.000x 1.000x 2.000x 1.000x 3.50 2.50 7"


@pytest.mark.parametrize("arms", [(STOCK, SGL), (STOCK,), (SGL,)])
def test_with_slowdowns_the_grid_has_a_second_table(arms: tuple[str, ...]) -> None:
    grid = [
        comparison(*arms, cache_fraction=fraction, with_slowdown=True) for fraction in (0.25, 0.5)
    ]
    lines = grid_table(TRACE, grid).splitlines()
    rows = [line for line in lines if line.lstrip().startswith(("0.25 ", "0.5 "))]
    assert len(rows) == 4
    assert len(rows[2]) == len(rows[3])
    again = ["1.500"] * len(arms)  # 90 tokens for 60 new ones
    cells = rows[2].split()[2 if arms == (STOCK,) else 3 :]
    assert cells[: len(arms)] == again
    if len(arms) == 2:
        assert cells[2:5] == ["1.000x", "2.000x", "2.000x"]
        assert cells[5:7] == ["2.00", "2.00"]


@pytest.mark.parametrize("arm", [STOCK, SGL])
def test_the_grid_of_one_arm_has_its_numbers_in_place_of_ratios(arm: str) -> None:
    text = grid_table(TRACE, [comparison(arm, load=None, cache_fraction=f) for f in (0.25, 0.5)])
    assert "ratio" not in text and "1.000x" not in text
    assert ("policy" in text) == (arm == SGL)
    assert "load" not in text


def test_a_document_of_the_grid_names_its_own_combination() -> None:
    arguments = {"policy": ("lpm", "fcfs"), "load": (0.5, 0.8), "trace": "by hand", "seed": 0}
    document = as_document(arguments, TRACE, CostModel(), comparison(policy="fcfs"))
    assert document["arguments"] == {
        "policy": "fcfs",
        "load": 0.8,
        "trace": "by hand",
        "seed": 0,
        "cache_tokens": None,
        "cache_fraction": 0.5,
    }
    assert document["ratio"]["ttft_p99_s"] == pytest.approx(2.0)
    json.dumps(document)
