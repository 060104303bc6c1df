"""select over a scripted server's prompt log-probabilities."""

from __future__ import annotations

import pytest

import sgl_vllm as sgl
from sgl_vllm.protocol import scoring as scoring_protocol
from tests.unit.lang.scripted import appending

PAIR = 0x110000  # the fake tokenizer's one token for "ab"
LONG = "A beginning that is long enough to be worth a request of its own before the choices: "

pytestmark = pytest.mark.usefixtures("backend")


def choose(prompt, choices, **options):
    @sgl.function
    def program(s):
        if prompt:
            s += prompt
        s += sgl.select("pick", choices, **options)

    return program.run()


def scoring(server):
    return [b for b in server.bodies("/v1/completions") if "prompt_logprobs" in b]


def test_all_choices_are_scored_in_one_request_from_the_end_of_the_prefix(server):
    choose("Q:", ["no", "yes"])
    (body,) = scoring(server)
    assert body["prompt"] == [[1, *map(ord, "Q:no")], [1, *map(ord, "Q:yes")]]
    assert body["vllm_xargs"]["sgl_score_from"] == 3
    assert (body["max_tokens"], body["temperature"], body["prompt_logprobs"]) == (1, 0.0, 0)


def test_a_token_merged_over_the_seam_is_scored_for_every_choice(server):
    server.logprob = lambda token, position: -0.5 if token == PAIR else -1.0
    state = choose("Xa", ["b", "c"])
    (body,) = scoring(server)
    assert body["prompt"] == [[1, ord("X"), PAIR], [1, ord("X"), ord("a"), ord("c")]]
    assert body["vllm_xargs"]["sgl_score_from"] == 2
    assert state.get_meta_info("pick")["token_logprobs"] == [[-0.5], [-1.0, -1.0]]
    assert state["pick"] == "b"


def test_the_cost_of_a_gateway_that_does_not_tokenize_is_counted(server):
    server.tokenizes = False
    state = choose("Q:", ["no", "yes"])
    (body,) = scoring(server)
    assert body["prompt"] == [[1, *map(ord, "Q:no")], [1, *map(ord, "Q:yes")]]
    assert state.usage.calls == len(server.calls) == 4


def test_select_on_an_empty_prompt_scores_after_the_beginning_token(server):
    server.logprob = lambda token, position: -float(token)
    assert choose("", ["b", "a"])["pick"] == "a"
    assert scoring(server)[0]["vllm_xargs"]["sgl_score_from"] == 1


def test_the_unconditional_method_scores_the_choices_alone_too(server):
    # Without the prompt (position 1), "b" is much less likely than after it; "a" is equally likely.
    server.logprob = lambda token, position: (
        -9.0 if chr(token) == "b" and position == 1 else {"a": -1.0}.get(chr(token), -2.0)
    )
    assert choose("Q:", ["a", "b"])["pick"] == "a"
    server.requests.clear()
    method = sgl.unconditional_likelihood_normalized
    state = choose("Q:", ["a", "b"], choices_method=method)
    assert state["pick"] == "b"
    assert state.get_meta_info("pick")["scores"] == pytest.approx([0.0, 7.0])
    assert [body["prompt"] for body in scoring(server)][1] == [[1, ord("a")], [1, ord("b")]]


@pytest.mark.parametrize("tokenizes", [True, False], ids=["vLLM", "Ray Serve LLM"])
def test_a_select_in_a_chat_continues_the_assistant_turn(server, tokenizes):
    server.tokenizes = tokenizes

    @sgl.function
    def program(s):
        s += sgl.user("Well?")
        s += sgl.assistant(sgl.select("pick", ["yes", "no"]))
        s += sgl.user("Sure?")
        with s.assistant():
            s += "I say " + sgl.select("again", ["no", "yes"])

    server.logprob = lambda token, position: -0.1 if chr(token) in "yes" else -3.0
    state = program.run()
    assert (state["pick"], state["again"]) == ("yes", "yes")
    first, second = scoring(server)
    text = "".join(map(chr, first["prompt"][0][1:]))
    assert text == "<user>Well?</><assistant>yes"
    assert "".join(map(chr, second["prompt"][1][1:])).endswith("<assistant>I say yes")
    assert state.messages()[1] == {"role": "assistant", "content": "yes"}


def test_a_long_new_prefix_is_sent_ahead_on_a_server_with_the_plugin(server):
    server.plugin = True
    choose(LONG, ["no", "yes"])
    (hint,) = server.hints
    assert hint["prompt"] == [1, *map(ord, LONG)]
    assert server.bodies("/v1/completions").index(hint) == 0


def test_no_prefix_is_sent_ahead_of_a_select_where_it_would_not_help(server):
    choose(LONG, ["no", "yes"])  # a stock server does not read its cache for prompt logprobs
    server.plugin = True
    choose("short", ["no", "yes"])
    after_gen = appending(LONG + sgl.gen("a", max_tokens=5) + sgl.select("pick", ["no", "yes"]))
    after_gen.run(backend=sgl.VLLM(server.url))
    assert server.hints == []


@pytest.mark.parametrize("plugin", [False, True])
def test_every_chat_has_what_its_template_takes_and_no_other_prompt_has(server, plugin):
    server.plugin = plugin
    options = {"enable_thinking": False}
    backend = sgl.VLLM(server.url, chat_template_kwargs=options)
    text = appending(LONG + sgl.select("pick", ["no", "yes"]) + sgl.gen("text", max_tokens=2))
    chat = appending(
        sgl.user(LONG) + sgl.assistant(sgl.gen("answer", max_tokens=2)),
        sgl.user("Well?") + sgl.assistant(sgl.select("pick", ["no", "yes"])),
    )
    text.run(backend=backend)
    assert not [body for _, body in server.requests if body and "chat_template_kwargs" in body]
    server.requests.clear()
    chat.run(backend=backend)
    chats = [body for _, body in server.requests if body and "messages" in body]
    chats += [body["prompt"] for body in server.bodies("/v1/sgl/score")]
    chats += [one for body in server.bodies("/v1/sgl/score") for one in body["continuations"]]
    assert len(chats) > 2
    assert [body.get("chat_template_kwargs") for body in chats] == [options] * len(chats)


@pytest.mark.parametrize("plugin", [False, True])
def test_every_request_that_runs_the_model_carries_the_salt_of_its_tenant(server, plugin):
    """Scores of a select are asked of `/v1/sgl/score` first, which this server does not have."""
    server.plugin = plugin
    backend = sgl.VLLM(server.url, cache_salt="team")
    text = appending(LONG + sgl.select("pick", ["no", "yes"]) + sgl.gen("text", max_tokens=2))
    chat = appending(sgl.user("Well?") + sgl.assistant(sgl.gen("answer", max_tokens=2)))
    for program in (text, chat):
        program.run(backend=backend)
        assert list(program.run(backend=backend, stream=True).text_iter())
    ran = [
        (path, body) for path, body in server.requests if "/sgl/s" in path or "completions" in path
    ]
    assert ("/v1/sgl/score" in {path for path, body in ran if body}) == plugin
    assert {body["cache_salt"] for _, body in ran if body} == {"team"}


def test_the_scores_of_a_select_belong_to_its_program(server):
    server.plugin = True
    text = appending(LONG + sgl.gen("text", max_tokens=2) + sgl.select("pick", ["no", "yes"]))
    for _ in range(2):
        text.run()
    named = [body["vllm_xargs"]["sgl_program"] for body in server.calls if "vllm_xargs" in body]
    scored = [body["sgl_program"] for body in server.bodies("/v1/sgl/score")]
    assert len(set(scored)) == 2
    assert set(scored) == set(named)


def test_more_choices_than_one_score_request_takes_are_scored_by_other_routes(server, monkeypatch):
    monkeypatch.setattr(scoring_protocol, "MAX_CONTINUATIONS", 10)
    server.plugin = True
    server.logprob = lambda token, position: 0.0 if chr(token) == "7" else -1.0
    choose("Q:", [str(number) for number in range(11)])
    assert "/v1/sgl/score" not in {path for path, _ in server.requests}
    (body,) = scoring(server)
    assert len(body["prompt"]) == 11
