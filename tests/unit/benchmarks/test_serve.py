"""`benchmarks.serve`: what is sent, how it is joined, what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("prometheus_client")

from benchmarks.serve.__main__ import DATASETS, _parser, main, plan_of
from benchmarks.serve.result import Comparison, DatasetResult, Round, joined
from sgl_vllm.server_process import Counters

COUNTERS = Counters(
    forward_passes=40,
    prompt_tokens=1000,
    cached_prompt_tokens=300,
    output_tokens=160,
    forced_tokens=0,
    preemptions=0,
)


def said(throughput: float = 4.0, **others: Any) -> Mapping[str, Any]:
    times = {
        f"p{percent}_{name}_ms": float(percent)
        for name in ("ttft", "tpot", "e2el")
        for percent in (50, 99)
    }
    return {
        "completed": 16,
        "failed": 0,
        "duration": 16 / throughput,
        "request_throughput": throughput,
        "output_throughput": 10 * throughput,
        "total_input_tokens": 998,
        "total_output_tokens": 160,
        **times,
        **others,
    }


def a_round(throughput: float, **others: Any) -> Round:
    content = said(throughput, **others)
    return Round(joined(content, COUNTERS), content)


# -- joining, medians, ratios


def test_times_are_vllms_in_seconds_and_counts_are_the_servers() -> None:
    figures = joined(said(), COUNTERS)
    assert (figures.ttft_p99_s, figures.tpot_p50_s) == (0.099, 0.05)
    assert (figures.prompt_tokens_sent, figures.prompt_tokens) == (998, 1000)
    assert (figures.computed_prompt_tokens, figures.cached_prompt_tokens) == (700, 300)


def test_the_json_has_medians_rounds_and_what_vllm_said() -> None:
    one = DatasetResult(
        "random",
        16,
        ("vllm", "bench", "serve", "--dataset-name", "random"),
        stock=(a_round(4.0), a_round(5.0), a_round(1.0)),
        sgl=(a_round(4.0), a_round(8.0), a_round(9.0)),
    )
    content = json.loads(Comparison("demo", (one,), {"radix": "on"}, (), {"vllm": "0"}).to_json())
    assert content["benchmark"] == "vllm bench serve"
    assert content["command"] == {"random": "vllm bench serve --dataset-name random"}
    (dataset,) = content["datasets"]
    assert dataset["ratio"] == {"throughput": 2.0, "ttft_p99": 1.0, "tpot_p50": 1.0}
    assert dataset["arms"]["stock"]["throughput_requests_s"] == 4.0
    rounds = dataset["arms"]["sgl"]["rounds"]
    assert [one["vllm_bench_serve"]["request_throughput"] for one in rounds] == [4.0, 8.0, 9.0]


# -- what is sent


@settings(deadline=None)
@given(st.integers(1, 300))
def test_prefixes_divide_the_prompts_so_that_all_are_sent(num_prompts: int) -> None:
    num_prefixes = int(DATASETS["prefix_repetition"](num_prompts)[-1])
    assert num_prompts % num_prefixes == 0
    assert num_prefixes <= 10
    assert num_prefixes == 1 or num_prompts // num_prefixes >= 2


# -- the command


def test_a_quick_run_is_one_round_of_fewer_prompts_of_the_datasets_named(tmp_path: Path) -> None:
    words = ["--quick", "--dataset", "random", "--bench-args=--temperature 1"]
    plan = plan_of(_parser().parse_args(words), tmp_path)
    assert plan.rounds == 1
    assert plan.words[-2:] == ("--temperature", "1")  # what the user gives wins
    assert (plan.num_prompts, [*plan.datasets]) == (32, ["random"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "sharegpt"], "invalid choice: 'sharegpt'"),
        (["--request-rate", "0"], "0 is not above 0"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
