"""The primitives on the demo's model, on one server with the plugin whose JSON is compact."""

from __future__ import annotations

from typing import Literal

import pytest

import sgl_vllm as sgl
from sgl_vllm.server_process import Counters, VllmServer
from tests.server.conftest import API_KEY
from tests.server.test_examples import run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Country = Literal["Peru", "Kenya", "Japan"]
BLOCK_SIZE = 32
"""A request that arrives while the last block of its prefix is being computed does not find that
block."""


@pytest.fixture(scope="module")
def server(compact_server: VllmServer) -> VllmServer:
    return compact_server


@pytest.fixture
def backend(server: VllmServer) -> sgl.VLLM:
    backend = sgl.VLLM(server.url, api_key=API_KEY)
    sgl.flush_cache(backend)
    return backend


@pytest.fixture
def before(server: VllmServer, backend: sgl.VLLM) -> Counters:
    return server.counters()


def look_up(country: Country) -> str:
    """A fact about a country."""
    return f"{country} is a country."


@sgl.function
def research(s, question):
    answer = sgl.gen("answer", max_tokens=16)
    s += sgl.agent(answer, question, [look_up], max_turns=3, max_parallel=2)


def test_agents_write_only_valid_calls_and_compute_each_token_once(server, backend):
    calls: list[sgl.ToolCall] = []
    usage = sgl.Usage()
    for country in ("Peru", "Kenya", "Japan", "France", "Egypt"):
        before = server.counters()
        state = research.run(f"What is the capital of {country}?", temperature=0.0, backend=backend)
        spent = server.counters() - before
        meta = state.get_meta_info("answer")
        calls += meta["tool_calls"]
        if meta["tool_calls"]:
            usage += state.usage
        assert state.usage.calls == meta["turns"] + 1
        # Every prompt begins with the one before. A reply is computed again where the tokenizer
        # spells it with other tokens than the model.
        again = state.usage.completion_tokens
        assert spent.computed_prompt_tokens <= meta["prompt_tokens"] + again
    assert calls, "the model has asked for no call"
    for call in calls:
        assert (call.tool, call.error) == ("look_up", None)
        assert call.result == f"{call.arguments['country']} is a country."
    # Of a call only the country is the model's, and whether another one follows.
    assert usage.forced_tokens > usage.completion_tokens / 2


def test_a_judge_grades_the_branches_of_best_of_on_their_cached_prompts(server, backend, before):
    @sgl.function
    def program(s):
        # Long enough to be sent ahead: of short prompts, a step computes each that it admits.
        s += sgl.system("You are a helpful assistant. " * 20)
        s += sgl.user("Give one tip for staying healthy.")
        grade = sgl.judge("grade", "Rate this text from 1 to 5.")
        s += sgl.assistant(sgl.best_of(sgl.gen("tip", max_tokens=16), 3, score=grade))

    state = program.run(temperature=0.9, backend=backend)
    spent = server.counters() - before
    scores = state.get_meta_info("tip")["scores"]
    assert len(scores) == 3
    assert all(1 <= score <= 5 for score in scores.values())
    assert state.messages()[-1] == {"role": "assistant", "content": state["tip"]}
    assert spent.computed_prompt_tokens < spent.prompt_tokens / 2


def test_a_retry_continues_the_cached_prompt(server, backend, before):
    seen: list[str] = []

    def reject_two(text: str) -> str | None:
        seen.append(text)
        return "name another one" if len(seen) < 3 else None

    @sgl.function
    def program(s):
        s += sgl.user("Name a country.")
        s += sgl.assistant(sgl.retry_until(sgl.gen("country", max_tokens=8), reject_two))

    state = program.run(temperature=0.0, backend=backend)
    spent = server.counters() - before
    assert seen[-1] == state["country"] and len(seen) == 3
    meta = state.get_meta_info("country")
    assert meta["errors"] == ["name another one"] * 2
    assert spent.computed_prompt_tokens <= meta["prompt_tokens"] + 3


def test_the_example_runs(server):
    finished = run_example("primitives", server.url)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    lines = finished.stdout.splitlines()
    names = ("agent: ", "vote: ", "best_of: ", "map_reduce: ", "retry_until: ")
    found = [next(line for line in lines if line.startswith(name)) for name in names]
    assert "['Lima', 'Nairobi', 'Paris', 'Cairo']" in found[3]
    assert found[4] == "retry_until: 'Nairobi' after ['it has 6 words, not one']"
