"""Tools and programs may name their parameters as they like."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sgl_vllm as sgl
import sgl_vllm.sglang as sglang
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.timeout(20)

NAMES = """
    args arguments at bound call call_id cls context coroutine expr func function func_name item key
    known kwargs loop maker method name node operation owner program prompt run self signature state
    task tool tools
"""
NOTHING = ScriptedBackend()

by_name = pytest.mark.parametrize("name", NAMES.split())


class Maker:
    """Makes functions with parameters of any name, in files, because tracing reads their source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tool(self, name: str, before: str = "def f(") -> Any:
        return self._function(f"{before}{name}: str) -> str:\n    return {name} + '!'\n")

    def program(self, name: str, text: str = "") -> Any:
        text = text or f"{name} + '!'"
        return self._function(f"def f(s, {name}):\n    s += {text}\n")

    def _function(self, source: str) -> Any:
        file = self._folder / "functions.py"
        file.write_text(source)
        return runpy.run_path(str(file))["f"]


@pytest.fixture
def made(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


@by_name
@pytest.mark.parametrize("before", ["def f(", "async def f(", "def f(*, "])
def test_an_agent_calls_a_tool_with_any_parameter(made: Maker, name: str, before: str) -> None:
    call = {"calls": [{"tool": "f", "arguments": {name: "x"}}]}
    replies = iter([json.dumps(call), '{"calls": []}', "done"])
    tool = made.tool(name, before)

    @sgl.function
    def asking(s):
        s += sgl.agent("answer", "Go.", [tool])

    state = asking.run(backend=ScriptedBackend(reply=lambda prompt: next(replies)))
    (done,) = state.get_meta_info("answer")["tool_calls"]
    assert (done.arguments, done.result, done.error) == ({name: "x"}, "x!", None)


@by_name
@pytest.mark.parametrize("tool", [sgl.tool, sgl.read_only_tool])
@pytest.mark.parametrize("before", ["def f(", "async def f("])
def test_a_program_calls_a_tool_with_any_parameter(
    made: Maker, name: str, tool: Callable[..., Any], before: str
) -> None:
    function = made.tool(name, before)

    @sgl.function
    def calling(s):
        s += tool("seen", function, **{name: "x"})

    assert calling.run(backend=NOTHING)["seen"] == "x!"


@by_name
def test_a_program_may_have_any_parameter(made: Maker, name: str) -> None:
    program, given = sgl.function(made.program(name)), {name: "x"}
    assert program.run(**given, backend=NOTHING).text() == "x!"
    assert asyncio.run(program.run_async(**given, backend=NOTHING)).text() == "x!"
    assert program.with_options(backend=NOTHING).run(**given).text() == "x!"
    assert asyncio.run(program.with_options(backend=NOTHING).run_async(**given)).text() == "x!"
    assert program.bind(**given).run(backend=NOTHING).text() == "x!"
    assert program.item(**given) == given
    (state,) = program.run_batch([given], backend=NOTHING)
    assert state.text() == "x!"
    program.cache(backend=NOTHING, **given)


@by_name
def test_a_traced_program_may_have_any_parameter(made: Maker, name: str) -> None:
    program, given = sgl.function(made.program(name)), {name: "x"}
    assert "x!" in str(program.trace(**given))
    assert program.compile(**given).run(backend=NOTHING).text() == "x!"
    compiled = program.compile()
    assert compiled.run(**given, backend=NOTHING).text() == "x!"
    assert compiled.bind(**given).run(backend=NOTHING).text() == "x!"

    @sgl.function
    def outer(s, value):
        compiled(s, **{name: value})

    assert outer.run("x", backend=NOTHING).text() == "x!"


@by_name
def test_a_traced_template_may_have_any_field(made: Maker, name: str) -> None:
    program = sgl.function(made.program(name, f"'a {{{name}}}'.format({name}={name})"))
    assert program.compile().run(**{name: "x"}, backend=NOTHING).text() == "a x"


@by_name
def test_a_program_of_sglangs_language_may_have_any_parameter(made: Maker, name: str) -> None:
    program = sglang.function(made.program(name))
    given = {name: "x"}
    assert program.run(**given, backend=NOTHING).text() == "x!"
    assert program.bind(**given).run(backend=NOTHING).text() == "x!"
    assert program.compile().run(**given, backend=NOTHING).text() == "x!"


@pytest.mark.parametrize("name", ["stop", "max_new_tokens", "stream", "timeout_s", "backend"])
def test_a_parameter_behind_an_option_of_run_is_given_in_other_ways(made: Maker, name: str) -> None:
    program = sgl.function(made.program(name))
    says = rf"has a parameter {name}, and run an option of that name: .* bind\({name}=\.\.\.\)"
    given: dict[str, Any] = {"backend": NOTHING, name: "x"}
    with pytest.raises(TypeError, match=says):
        program.run(**given)
    with pytest.raises(TypeError, match=says):
        asyncio.run(program.run_async(**given))
    assert program.run("x", backend=NOTHING).text() == "x!"
    assert program.bind(**{name: "x"}).run(backend=NOTHING).text() == "x!"
