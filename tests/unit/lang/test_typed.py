"""Variables read by the expression that makes them, and options given ahead of the arguments."""

from __future__ import annotations

import asyncio

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.ir import VariableExpr

pytestmark = pytest.mark.usefixtures("backend")

AGE: VariableExpr[int] = sgl.gen("age", dtype=int)


@pytest.fixture(autouse=True)
def answers_42(server):
    server.reply = lambda prompt: "42"


@sgl.function
def ages(s, name: str = "Ann"):
    s += f"{name} is " + AGE
    return s[AGE] + 1


@sgl.function
async def ages_async(s):
    s += "She is " + AGE
    return await s[AGE] + await s["age"]


# --- variables by their expressions --------------------------------------------------------------


def test_a_variable_is_read_by_the_expression_that_makes_it():
    state = ages.run()
    assert state.ret_value == 43
    assert state[AGE] == state["age"] == 42
    assert state.get_meta_info(AGE)["finish_reason"] == "stop"
    assert ages_async.run().ret_value == 84


def test_a_compiled_program_reads_variables_by_their_expressions_too():
    assert ages.compile().run().ret_value == 43

    @sgl.function
    def with_deferred_options(s, limit):
        age = sgl.gen("age", dtype=int, max_tokens=limit)
        s += age
        return s[age], s.get_meta_info(age)["finish_reason"]

    assert with_deferred_options.run(9).ret_value == (42, "stop")
    assert with_deferred_options.compile().run(9).ret_value == (42, "stop")


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (sgl.gen(dtype=int), "a gen without a name makes no variable"),
        (sgl.gen("texts", n=3), r"gen 'texts' makes a list of n values.*s\['texts'\]"),
    ],
)
def test_an_expression_that_stands_for_no_single_value_is_refused(expr, message):
    @sgl.function
    def program(s):
        s += "x" + expr
        return s[expr]

    with pytest.raises(TypeError, match=message):
        program.run()
    with pytest.raises(sgl.TraceError, match=message):
        program.compile()


def test_a_joined_variable_is_a_list_and_read_by_its_name():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "x" + AGE
        forks.join()
        return s["age"], [branch[AGE] for branch in forks]

    @sgl.function
    def wrong(s):
        program(s)
        return s[AGE]

    @sgl.function
    async def wrong_async(s):
        forks = s.fork(2)
        forks += AGE
        forks.join()
        return await s[AGE]

    message = r"'age' is a list that a join made: read it by its name, s\['age'\]"
    assert program.run().ret_value == ([42, 42], [42, 42])
    assert program.compile().run().ret_value == ([42, 42], [42, 42])
    for each in (wrong, wrong_async):
        with pytest.raises(TypeError, match=message):
            each.run()
        with pytest.raises(sgl.TraceError, match=message):
            each.compile()


# --- options ahead of the arguments --------------------------------------------------------------


def test_options_given_ahead_are_those_of_run(server):
    greedy = ages.with_options(temperature=0.0, top_p=0.5, stop=["x"])
    states = [greedy.run("Bob"), asyncio.run(greedy.run_async(name="Eve"))]
    assert [state.ret_value for state in states] == [43, 43]
    ages.run("Bob", temperature=0.0, top_p=0.5, stop=["x"])
    ids = ("request_id", "vllm_xargs")
    sent = [{key: call[key] for key in call if key not in ids} for call in server.calls]
    assert sent == [sent[2], {**sent[2], "prompt": "Eve is "}, sent[2]]
    assert (sent[2]["temperature"], sent[2]["top_p"], sent[2]["stop"]) == (0.0, 0.5, ["x"])


def test_a_parameter_may_have_the_name_of_an_option(server):
    @sgl.function
    def program(s, temperature):
        s += f"At {temperature} degrees, water is" + sgl.gen("water")

    state = program.with_options(temperature=0.0).run(temperature=100)
    assert state.text() == "At 100 degrees, water is42"
    assert server.calls[0]["temperature"] == 0.0


def test_items_of_a_batch_are_checked_like_a_call():
    items = [ages.item("Bob"), ages.item(name="Eve"), ages.item()]
    assert items == [{"name": "Bob"}, {"name": "Eve"}, {}]
    assert [state.text() for state in ages.run_batch(items)] == [
        f"{name} is 42" for name in ("Bob", "Eve", "Ann")
    ]
    with pytest.raises(TypeError, match="too many positional arguments"):
        ages.item("Bob", 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'nam'"):
        ages.item(nam="Bob")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'name'"):
        ages.item("Bob", name="Eve")  # type: ignore[misc]
