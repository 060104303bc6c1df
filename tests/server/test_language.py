"""Programs in the language against the real servers: stock vLLM and vLLM with the plugin."""

from __future__ import annotations

import httpx
import pytest

import sgl_vllm as sgl
from tests.server.conftest import API_KEY

SHOTS = "".join(f"Word: item{i}\nKind: {'thing' if i % 2 else 'name'}\n\n" for i in range(20))
ENDINGS = [" thing", " name", " number", " place"]
METHODS = [
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
]


@pytest.fixture(scope="module")
def plugin(server) -> sgl.VLLM:
    return sgl.VLLM(server.url, api_key=API_KEY)


@sgl.function
def everything(s):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user("What is the capital of France? Answer in a word or two, please, nothing more.")
    s += sgl.assistant(sgl.gen("capital", max_tokens=12))
    s += sgl.user("Three facts about it, one at a time, each of them in a short plain sentence.")
    forks = s.fork(3)
    forks += lambda i: sgl.user(f"Fact {i + 1}?") + sgl.assistant(sgl.gen("fact", max_tokens=12))
    forks.join()
    s += sgl.user("Is it large?")
    with s.assistant():
        s += "The answer is" + sgl.select("large", [" yes", " no", " maybe"])
        s += ", as " + sgl.gen("year", dtype=int) + " people say: "
        s += sgl.gen("word", max_tokens=8, regex="[a-z]{3,6} [a-z]{3,6}")


@sgl.function
def classify(s, method):
    s += SHOTS + "Word: item20\nKind:"
    s += sgl.select("kind", ENDINGS, choices_method=method)


def test_a_program_with_everything_gives_the_same_on_stock_and_with_the_plugin(stock, plugin):
    first, second = (everything.run(temperature=0.0, backend=b) for b in (stock, plugin))
    for name in ("capital", "fact", "large", "year", "word"):
        assert first[name] == second[name], name
    assert first.text() == second.text()
    assert first.messages() == second.messages()
    assert len(first["fact"]) == 3
    assert isinstance(first["year"], int)


@sgl.function
def card(s):
    s += "A card: " + sgl.gen("card", regex=r'\{"name": "[A-Z][a-z]{2,8}"\}')


def test_a_stream_counts_the_forced_tokens_as_a_whole_answer_does(plugin):
    whole, streamed = (card.run(temperature=0, stream=s, backend=plugin) for s in (False, True))
    streamed.sync()
    assert 0 < streamed.usage.forced_tokens == whole.usage.forced_tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_select_has_the_same_scores_on_stock_and_with_the_plugin(stock, plugin, method):
    first, second = (classify.run(method, backend=b).get_meta_info("kind") for b in (stock, plugin))
    assert second["scores"] == pytest.approx(first["scores"], abs=1e-4)
    for ours, theirs in zip(second["token_logprobs"], first["token_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(set(first["scores"])) == len(ENDINGS)


def test_a_run_is_told_why_its_prompts_were_not_cached(server):
    @sgl.function
    def program(s, number):
        s += SHOTS + f"Word: item{number}\nKind:" + sgl.gen("kind", max_tokens=2)
        s += "\nReason:" + sgl.gen("reason", max_tokens=2)

    tenant = sgl.VLLM(server.url, api_key=API_KEY, cache_salt="asks why")
    sgl.flush_cache(tenant)
    for number, cause in ((20, "new"), (31, "differs")):
        before = server.counters()
        state = program.run(number, temperature=0.0, backend=tenant)
        spent = server.counters() - before
        missed = sgl.why(state)
        assert cause in missed and sum(missed.values()) == spent.computed_prompt_tokens
    assert "the prompt differs from what is cached" in sgl.to_html(state)


def test_each_server_says_what_it_is(server, stock, plugin):
    stats = sgl.get_server_info(plugin).stats
    assert stats is not None and stats["parts"]["select"] == "on"
    assert not sgl.get_server_info(stock).plugin
    assert httpx.get(f"{stock.url}/v1/sgl/stats").status_code == 404
    assert "sgl_vllm" not in httpx.get(f"{stock.url}/metrics").text
    with pytest.raises(sgl.UnsupportedError, match="flush_cache"):
        sgl.flush_cache(stock)
    with pytest.raises(sgl.BackendError, match="needs an api_key"):
        sgl.get_server_info(sgl.VLLM(server.url))
