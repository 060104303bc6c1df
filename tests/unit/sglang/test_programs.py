"""Programs written for SGLang's language: their states, groups, graphs and meta information."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

import sgl_vllm as core
import sgl_vllm.sglang as sgl
from tests.unit.lang.conftest import FakeServer

# --- text and turns ------------------------------------------------------------------------------


def test_text_between_turns_is_kept_in_the_turn_before_it(server: FakeServer, endpoint) -> None:
    @sgl.function
    def chat(s):
        s += sgl.user("Hello.")
        s += " More."
        s += sgl.assistant(sgl.gen("answer"))

    server.reply = lambda prompt: "Hi."
    state = chat.run()
    assert server.calls[0]["messages"] == [{"role": "user", "content": "Hello. More."}]
    assert state.text() == "Hello. More.Hi."
    assert state.messages()[0]["content"] == "Hello. More."


def test_text_before_the_first_turn_begins_it(server: FakeServer, endpoint) -> None:
    @sgl.function
    def chat(s, question):
        s += "Be brief. "
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer"))

    chat.run_batch([{"question": "One?"}, {"question": "Two?"}])
    sent = [body["messages"][0]["content"] for body in server.calls]
    assert sorted(sent) == ["Be brief. One?", "Be brief. Two?"]


# --- join ----------------------------------------------------------------------------------------


def rename(language: Any) -> Any:
    @language.function
    def program(s):
        s["mood"] = "calm"
        forks = s.fork(2)
        for fork in forks:
            fork["mood"] = "angry"
            fork += "x" + language.gen("word")
        forks.join()

    return program


def test_join_gathers_only_names_that_are_new_to_the_parent(server: FakeServer, endpoint) -> None:
    server.reply = lambda prompt: "w"
    for program in (rename(sgl), rename(sgl).compile()):
        assert [program.run()[name] for name in ("mood", "word")] == ["calm", ["w", "w"]]
    ours = rename(core).run()
    assert (ours["mood"], ours["word"]) == (["angry", "angry"], ["w", "w"])


# --- typed texts ---------------------------------------------------------------------------------


class City(BaseModel):
    name: str


@pytest.mark.parametrize("dtype, text", [(int, "12"), (float, "1.5"), (bool, "True"), (str, '"a"')])
def test_the_variable_of_a_dtype_is_its_text(server: FakeServer, endpoint, dtype, text) -> None:
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("value", dtype=dtype)

    server.reply = lambda prompt: text
    assert program.run()["value"] == text
    assert "regex" in server.calls[0]["structured_outputs"]


def test_a_typed_text_that_was_cut_is_the_variable(server: FakeServer, endpoint) -> None:
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("city", json_schema=City) + sgl.gen_int("number")

    server.reply = lambda prompt: '{"name": "Pa'
    state = program.run()
    assert state["city"] == '{"name": "Pa'
    assert state["number"] == '{"name": "Pa'
    server.reply = lambda prompt: '{"name": "Paris"}'
    assert program.run()["city"] == City(name="Paris")


def test_options_have_sglangs_meanings() -> None:
    placed: Any = sgl.gen("x", 16, None, 1, "\n", None, None, 0.5)
    assert (placed.sampling.max_new_tokens, placed.sampling.temperature) == (16, 0.5)
    with pytest.raises(TypeError, match="one argument twice"):
        sgl.gen("x", 16, max_tokens=3)
    with pytest.warns(UserWarning, match="regex is ignored"):
        made = sgl.gen("x", dtype=int, regex="a+")
    assert made == sgl.gen("x", dtype=int)
    assert sgl.gen("x", max_tokens=0) == sgl.gen("x", max_tokens=1)
    assert sgl.select("x", ["a", "b"], temperature=0.7) == sgl.select("x", ["a", "b"])
    assert sgl.gen("x", json_schema="{}").parse is None


# --- select --------------------------------------------------------------------------------------


def test_sglangs_methods_are_called_with_its_keywords() -> None:
    # Three choices of one, two and three tokens, as (logprob, token id, text).
    given: dict[str, Any] = {
        "choices": ["bee", "beehive", "honeybees"],
        "normalized_prompt_logprobs": [-0.2, -0.4, -0.1],
        "input_token_logprobs": [
            [[-0.2, 1, None]],
            [[-0.2, 1, None], [-0.6, 2, None]],
            [[-0.25, 3, None], [-0.03, 4, None], [-0.02, 5, None]],
        ],
        "output_token_logprobs": [[], [], []],
    }
    assert sgl.token_length_normalized(**given).decision == "honeybees"
    greedy = sgl.greedy_token_selection(**given)
    assert greedy.decision == "bee"
    assert greedy.meta_info is not None
    assert greedy.meta_info["greedy_logprob_matrix"][1] == pytest.approx([-0.2, -0.6, -0.4])
    alone: list[Any] = [
        [[None, 1, None]],
        [[None, 1, None], [-2.0, 2, None]],
        [[None, 3, None], [-0.03, 4, None], [-0.02, 5, None]],
    ]
    normalized = sgl.unconditional_likelihood_normalized(
        **given, unconditional_token_logprobs=alone
    )
    assert normalized.decision == "beehive"
    assert normalized.meta_info is not None
    gains = normalized.meta_info["normalized_unconditional_prompt_logprobs"]
    assert gains == pytest.approx([-0.2, 0.6, -0.25 / 3])


# --- meta information ----------------------------------------------------------------------------


def test_meta_info_has_sglangs_names(server: FakeServer, endpoint) -> None:
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("word", return_logprob=True, top_logprobs_num=2)

    server.reply = lambda prompt: "ab"
    meta = program.run().get_meta_info("word")
    assert meta["output_token_logprobs"] == [(-0.5, None, "a"), (-0.5, None, "b")]
    assert meta["output_top_logprobs"][0] == [(-0.5, None, "a"), (-2.0, None, "?")]
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert {"id", "prompt_tokens", "completion_tokens", "cached_tokens"} <= set(meta)
    assert meta["cached_tokens"] == meta["prompt_tokens"] // 2


def test_meta_info_of_a_select_and_of_a_value(server: FakeServer, endpoint) -> None:
    @sgl.function
    def program(s):
        s["given"] = 3
        s += "Say: " + sgl.select("word", ["a", "cd"])

    state = program.run()
    meta = state.get_meta_info("word")
    assert meta["normalized_prompt_logprobs"] == [-1.0, -1.0]
    assert [len(tokens) for tokens in meta["input_token_logprobs"]] == [1, 2]
    assert state.get_meta_info("given") == {}


# --- programs ------------------------------------------------------------------------------------


def test_a_graph_is_shown_from_its_last_node(endpoint) -> None:
    @sgl.function
    def program(s, question):
        s += "Q: " + question + sgl.gen("answer", stop="\n") + sgl.select("kind", ["a", "b"])
        s += "A: " + s["answer"]

    shown = program.trace().last_node.print_graph_dfs()
    assert "gen 'answer'" in shown and "select 'kind'" in shown and "question" in shown


def test_a_gen_with_unknown_options_is_traced_and_compiled(server: FakeServer, endpoint) -> None:
    @sgl.function
    def program(s, until):
        s += "Count: " + sgl.gen_int("number") + sgl.gen("rest", stop=until, dtype=int)

    server.reply = lambda prompt: "7"
    state = program.compile().run(until="x")
    assert (state["number"], state["rest"]) == ("7", "7")


def test_the_executor_of_a_state_names_its_variables(server: FakeServer, endpoint) -> None:
    """As SGLang's notebook on reasoning asks it."""

    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("word")

    state: Any = program.run(backend=endpoint)
    events = state.stream_executor.variable_event
    assert list(events) == ["word"] and events["word"].wait(5)
    assert state.stream_executor.text() == state.text()
