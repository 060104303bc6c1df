"""Tools and programs may name their parameters as they like."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import sgl_vllm as sgl
import sgl_vllm.sglang as sglang
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.timeout(20)

NAMES = """
    args arguments at bound call call_id cls context coroutine expr func function func_name index
    item key known kwargs loop maker method name node operation owner program prompt run self
    signature state task tool tools
"""
NOTHING = ScriptedBackend()

by_name = pytest.mark.parametrize("name", NAMES.split())


def made(source: str) -> Any:
    """The function `f` of a text."""
    namespace: dict[str, Any] = {"__name__": "user"}
    exec(source, namespace)
    return namespace["f"]


def program_with(name: str, text: str = "") -> Any:
    return made(f"def f(s, {name}):\n    s += {text or name + '+ chr(33)'}\n")


@by_name
@pytest.mark.parametrize("before", ["def f(", "async def f(", "def f(*, "])
def test_a_tool_may_have_any_parameter(name: str, before: str) -> None:
    function = made(f"{before}{name}: str) -> str:\n    return {name} + '!'\n")
    call = {"calls": [{"tool": "f", "arguments": {name: "x"}}]}
    replies = iter([json.dumps(call), '{"calls": []}', "done"])

    @sgl.function
    def asking(s):
        s += sgl.agent("answer", "Go.", [function])
        with s.user():
            s += sgl.tool("seen", function, **{name: "x"})
            s += sgl.read_only_tool("read", function, **{name: "x"})

    state = asking.run(backend=ScriptedBackend(reply=lambda prompt: next(replies)))
    (done,) = state.get_meta_info("answer")["tool_calls"]
    assert (done.arguments, done.result, done.error) == ({name: "x"}, "x!", None)
    assert (state["seen"], state["read"]) == ("x!", "x!")


@by_name
def test_a_program_may_have_any_parameter(name: str) -> None:
    program, given = sgl.function(program_with(name)), {name: "x"}
    assert asyncio.run(program.run_async(**given, backend=NOTHING)).text() == "x!"
    assert program.with_options(backend=NOTHING).run(**given).text() == "x!"
    assert asyncio.run(program.with_options(backend=NOTHING).run_async(**given)).text() == "x!"
    assert program.item(**given) == given
    (state,) = program.run_batch([given], backend=NOTHING)
    assert state.text() == "x!"
    program.cache(backend=NOTHING, **given)
    for kind in (program, sglang.function(program_with(name))):
        assert kind.run(**given, backend=NOTHING).text() == "x!"
        assert kind.bind(**given).run(backend=NOTHING).text() == "x!"
        assert kind.compile().run(**given, backend=NOTHING).text() == "x!"
        assert kind.compile(**given).run(backend=NOTHING).text() == "x!"
        assert kind.compile().bind(**given).run(backend=NOTHING).text() == "x!"

    @sgl.function
    def outer(s, value):
        program.compile()(s, **{name: value})

    assert outer.run("x", backend=NOTHING).text() == "x!"


@by_name
def test_a_traced_template_may_have_any_field(name: str) -> None:
    program = sgl.function(program_with(name, f"'a {{{name}}}'.format({name}={name})"))
    assert program.compile().run(**{name: "x"}, backend=NOTHING).text() == "a x"


@pytest.mark.parametrize("name", ["stop", "max_new_tokens", "stream", "timeout_s", "backend"])
def test_a_parameter_behind_an_option_of_run_is_given_in_other_ways(name: str) -> None:
    program = sgl.function(program_with(name))
    says = rf"has a parameter {name}, and run an option of that name: .* bind\({name}=\.\.\.\)"
    given: dict[str, Any] = {"backend": NOTHING, name: "x"}
    with pytest.raises(TypeError, match=says):
        program.run(**given)
    with pytest.raises(TypeError, match=says):
        asyncio.run(program.run_async(**given))
    assert program.run("x", backend=NOTHING).text() == "x!"
    assert program.bind(**{name: "x"}).run(backend=NOTHING).text() == "x!"
