"""`any_order`: which order is chosen, what it leaves as it was, and what the state says."""

from __future__ import annotations

import random

import pytest

import sgl_vllm as sgl
from tests.unit.lang.scripted import ScriptedBackend, appending

DOCS = [f"Document {name}: {name * 30}.\n" for name in "abcdefgh"]
A, B, C, D, E, *_ = DOCS


@sgl.function
def ask(s, docs, question="Why?"):
    s += sgl.user("Read.\n" + sgl.any_order(*docs) + question)
    s += sgl.assistant(sgl.gen("a", max_tokens=4))


@sgl.function
def complete(s, docs, **options):
    s += sgl.any_order(*docs, **options)
    s += "So" + sgl.gen("a", max_tokens=4)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


def shared_chars(prompts: list[str]) -> int:
    """Of each prompt, the longest beginning that an earlier one has, summed."""

    def common(left: str, right: str) -> int:
        pairs = enumerate(zip(left, right, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))

    return sum(
        max((common(prompt, other) for other in prompts[:i]), default=0)
        for i, prompt in enumerate(prompts)
    )


def test_the_first_order_is_the_given_one_and_later_ones_share_what_was_sent(backend):
    first = ask.run([C, A, B], backend=backend).orders()[0]
    assert (first.order, first.source, first.saved_chars) == ((0, 1, 2), "given", 0)
    assert backend.prompts == [f"<user>Read.\n{C}{A}{B}Why?"]
    second = ask.run([A, D, C], "How?", backend=backend).orders()[0]
    assert (second.order, second.source) == ((2, 0, 1), "memory")  # C, A, then D
    assert (second.shared_chars, second.shared_chars_as_given) == (len(C + A), 0)
    assert second.saved_chars == len(C + A)


def test_the_same_segments_keep_their_order_whatever_became_better_since(backend):
    ask.run([A, B], backend=backend)
    for other in (C, D, E):
        ask.run([B, other], backend=backend)
        ask.run([B, other, A], backend=backend)
    again = ask.run([B, A], "Again?", backend=backend)
    assert again.text().startswith("Read.\n" + A + B)


def test_a_batch_is_planned_as_a_whole(backend):
    rng = random.Random(4)
    items = [{"docs": rng.sample(DOCS, 4), "question": f"{i}?"} for i in range(40)]
    states = ask.run_batch(items, backend=backend)
    assert {state.orders()[0].source for state in states} <= {"batch", "memory"}
    given = ["Read.\n" + "".join(item["docs"]) for item in items]
    in_order = [state.text() for state in states]
    assert shared_chars(in_order) > 1.5 * shared_chars(given)
    alone = ScriptedBackend()
    one_by_one = [ask.bind(**item).run(backend=alone).text() for item in items]
    assert shared_chars(in_order) > 0.95 * shared_chars(one_by_one) > 1.5 * shared_chars(given)


# -- options


def test_a_key_sorts():
    for docs in ([C, A, B], [B, C, A]):
        state = complete.run(docs, key=str.upper, backend=ScriptedBackend())
        assert state.text().startswith(A + B + C)
        assert state.orders()[0].source == "key"


def test_repeated_segments_are_referred_to(backend):
    @sgl.function
    def chat(s, repeated):
        s += sgl.user(sgl.any_order(A, B, repeated=repeated)) + sgl.assistant(sgl.gen("a"))
        s += sgl.user(sgl.any_order(C, B, repeated=repeated)) + sgl.assistant(sgl.gen("b"))

    state = chat.run("Document {rank} here is {earlier} above.\n", backend=backend)
    assert state.messages()[2]["content"] == C + "Document 2 here is 2 above.\n"
    second = state.orders()[1]
    assert (second.order, second.repeated) == ((0,), (1,))
    assert chat.run("", backend=backend).messages()[2]["content"] == C
    assert chat.run(None, backend=ScriptedBackend()).messages()[2]["content"] == C + B


@pytest.mark.parametrize("docs", [[], [A], [""], ["", A, ""], [A, B, A]])
def test_there_may_be_few_segments_equal_or_empty_ones(docs, backend):
    assert complete.run(docs, backend=backend).text().startswith("".join(docs) + "So")


def test_arguments_are_checked_where_they_are_given():
    with pytest.raises(TypeError, match="not int"):
        sgl.any_order(A, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not Gen"):
        sgl.any_order(sgl.gen("x"))
    for template in ("{0}", "{"):
        with pytest.raises(ValueError, match="no field but"):
            sgl.any_order(A, repeated=template)
    with pytest.raises(ValueError, match="only 'approximate'"):
        sgl.any_order(A, reuse="exact")  # type: ignore[arg-type]
    assert sgl.any_order([A, B]).segments == sgl.any_order(A, B).segments


# -- approximate reuse


def test_the_server_is_told_where_the_segments_are_that_it_may_reuse(server):
    program = appending(
        "Read.\n" + sgl.any_order(A, "", B, key=str, reuse="approximate"),
        "So" + sgl.gen("a") + sgl.any_order(C) + sgl.gen("b"),
    )
    state = program.run(backend=sgl.VLLM(server.url))
    for body in server.bodies("/v1/completions"):
        asked, prompt = body["vllm_xargs"], body["prompt"]
        marks = asked["sgl_segments"]
        places = zip(marks[::2], marks[1::2], strict=True)
        assert asked["sgl_reuse"] == "approximate"
        assert sorted(prompt[start:end] for start, end in places) == [A, B]
    assert state.usage.reused_tokens == 0


def test_in_a_chat_they_are_counted_through_the_contents_of_all_messages(server):
    program = appending(
        sgl.system("You read."),
        sgl.user("Notes: " + sgl.any_order(A, B, reuse="approximate") + "Why?"),
        sgl.assistant("So: " + sgl.gen("a")),
        sgl.user(sgl.any_order(C, reuse="approximate")),
        sgl.assistant(sgl.gen("b")),
    )
    program.run(backend=sgl.VLLM(server.url))
    first, second = server.bodies("/v1/chat/completions")
    for body, segments in ((first, {A, B}), (second, {A, B, C})):
        marks = body["vllm_xargs"]["sgl_segments"]
        contents = "".join(message["content"] for message in body["messages"])
        places = zip(marks[::2], marks[1::2], strict=True)
        assert {contents[start:end] for start, end in places} == segments


# -- with the rest of the language


def test_a_segment_may_be_a_variable(backend):
    @sgl.function
    def found(s):
        s["doc"] = B
        s += sgl.any_order(A, sgl.var("doc")) + "So" + sgl.gen("a")

    assert found.run(backend=backend).text().startswith(A + B)
    with pytest.raises(KeyError, match="doc"):
        appending(sgl.any_order(sgl.var("doc"))).run(backend=backend)


def test_a_compiled_program_orders_when_it_runs(backend):
    compiled = ask.compile(docs=[C, A, B])
    assert "any_order of 3" in str(compiled.graph)
    complete.run([A], backend=backend)
    compiled.run(backend=backend)
    state = compiled.run(question="How?", backend=backend)
    assert state.text().startswith("Read.\n" + C + A + B + "How?")
    assert len(state.orders()) == 1


def test_a_list_that_only_a_run_knows_can_be_compiled_as_a_list(backend):
    @sgl.function
    def of_list(s, docs):
        s += sgl.user("Read.\n" + sgl.any_order(docs) + "Why?") + sgl.assistant(sgl.gen("a"))

    compiled = of_list.compile()
    compiled.run([C, A], backend=backend)
    assert compiled.run([A, B, C], backend=backend).text().startswith("Read.\n" + C + A + B)
    with pytest.raises(sgl.TraceError, match="docs"):
        ask.compile()
