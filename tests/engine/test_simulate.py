"""`benchmarks.simulate`: the real schedulers on a virtual clock, in the test's process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from benchmarks import simulate, traces
from benchmarks.comparison import Result
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import EngineSettings
from benchmarks.simulator import Simulation
from benchmarks.traces import Call, Program, Trace

ARMS = ("stock", "sgl")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet_for_these_tests_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command silences vLLM in its process; the servers of later tests are to be heard."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    level = logging.getLogger("vllm").level
    yield
    logging.getLogger("vllm").setLevel(level)


def run(
    trace: Trace,
    arm: str,
    *,
    cache_fraction: float = 1.5,
    async_scheduling: bool = False,
    concurrency: int | None = 1,
) -> Result:
    num_tokens = cache_fraction * traces.reuse(trace).working_set_tokens
    settings = EngineSettings(
        num_blocks=int(max(num_tokens, trace.max_call_tokens) / 16) + 2,
        block_size=16,
        max_model_len=trace.max_call_tokens + 1,
        max_num_seqs=16,
        async_scheduling=async_scheduling,
    )
    return Simulation(trace, arm, settings, CostModel(), concurrency=concurrency).run()


@pytest.mark.parametrize("arm", ARMS)
def test_a_cache_too_small_for_what_runs_preempts_and_serves_all(arm: str) -> None:
    trace = traces.generate("tree_of_thought", 78)
    result = run(trace, arm, cache_fraction=0.2, async_scheduling=True, concurrency=2)
    assert result.preemptions > 0
    assert result.requests == trace.num_calls
    assert result.computed_prompt_tokens > result.prompt_tokens - result.cached_prompt_tokens


def test_a_programs_time_is_that_in_which_any_of_its_calls_waits_or_runs() -> None:
    """A step, then a subagent beside a tool that takes 5 s, and a step that reads both."""

    def tokens(begin: int, length: int) -> np.ndarray:
        return np.arange(begin, begin + length, dtype=np.int32)

    first = Call(tokens(0, 100), tokens(1000, 2))
    history = np.concatenate([first.prompt, first.reply])
    subagent = Call(tokens(5000, 40), tokens(6000, 1), after=(0,))
    last = Call(np.concatenate([history, tokens(2000, 30)]), tokens(3000, 1), (0, 1), think_s=5.0)
    trace = Trace("by hand", (Program((first, subagent, last), arrival_s=2.0),))
    result = run(trace, "stock", concurrency=None)
    cost = CostModel()
    first_s = cost.seconds(steps=2, prefill=100, decode=1, context=100)
    subagent_s = cost.seconds(steps=1, prefill=40, decode=0, context=0)
    # Of the 132 tokens, the full blocks before the last token of the reply are cached: 96.
    last_s = cost.seconds(steps=1, prefill=36, decode=0, context=96)
    assert result.cached_prompt_tokens == 96
    assert result.program_times_s[0] == pytest.approx(first_s + subagent_s + last_s)
    assert 3 / result.throughput_requests_s == pytest.approx(first_s + subagent_s + 5 + last_s)


def test_the_command_prints_a_table_and_writes_all_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = f"--trace chat --requests 30 --cache-fraction 0.5 --load 0.8 --json {file}"
    assert simulate.main(words.split()) == 0
    assert "best possible hit rate" in capsys.readouterr().out
    document = json.loads(file.read_text())
    stock, sgl = document["arms"]["stock"], document["arms"]["sgl"]
    assert stock["prompt_tokens"] == sgl["prompt_tokens"] == document["trace"]["prompt_tokens"]
    assert sgl["hit_rate"] <= sgl["best_hit_rate"]
    assert sgl["parts"]["radix"] == "on"
    assert document["ratio"]["hit_rate"] == pytest.approx(sgl["hit_rate"] / stock["hit_rate"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace chat --cache-tokens 9 --policy lifo", "lifo"),
        ("--trace chat --cache-fraction 0", "not above 0"),
        ("--trace chatt --cache-tokens 9", "no_sharing"),
        ("--trace chat", "--cache-tokens"),
    ],
)
def test_a_mistake_is_refused_with_what_would_be_right(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        simulate.main(words.split())
    assert message in capsys.readouterr().err


# -- recurrent layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thinking_chat"])
def test_conversations_keep_the_states_that_they_go_on_from(name: str) -> None:
    """In the proportions of Qwen3-Next, an eighth as long. By age alone, they would compute more
    than twice what they have to, whether they go on from the end of an answer or of a prompt."""
    trace = traces.generate(name, 180, 0, Fraction(1, 8))
    block_size, num_groups = 68, 3
    reuse = traces.reuse(trace)
    all_blocks = reuse.working_set_tokens // block_size + num_groups * trace.num_calls
    settings = EngineSettings(
        num_blocks=all_blocks // 5,
        block_size=block_size,
        max_model_len=trace.max_call_tokens + 1,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        num_recurrent_groups=num_groups,
    )
    result = Simulation(trace, "sgl", settings, CostModel(), concurrency=12).run()
    unique = reuse.must_compute_tokens
    assert unique < result.computed_prompt_tokens < 1.5 * unique
