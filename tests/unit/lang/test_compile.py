"""Compiled programs run as the interpreted ones do, and code movement is honest."""

from __future__ import annotations

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.tracing.errors import TraceError

pytestmark = pytest.mark.usefixtures("backend")


def facts(state):
    """What a run gave."""
    names = list(state._stream.variables)
    return {
        "variables": {name: state[name] for name in names},
        "meta": {name: state.get_meta_info(name) for name in names},
        "text": state.text(),
        "messages": state.messages(),
        "returned": state.ret_value,
        "usage": state.usage,
    }


def facts_or_error(run):
    """What a run gave, or its error. An operation of a compiled program may have another name."""
    try:
        return facts(run())
    except sgl.ProgramError:
        return "ProgramError"
    except Exception as error:
        return repr(error)


def compiled_unless_it_fails(program, expected, **known):
    """The compiled program. None where computing a known value fails, as some value of the
    interpreted program does, too."""
    try:
        return program.compile(**known)
    except TraceError as error:
        assert isinstance(error.__cause__, AttributeError | LookupError | TypeError | ValueError), (
            error
        )
        assert isinstance(expected, str)
        return None


# --- the same as interpreted ---------------------------------------------------------------------


@sgl.function
def chats(s, question):
    s += sgl.system("Be brief.")
    s.user(question)
    with s.assistant():
        s += "Well, " + sgl.gen("answer")
    s += sgl.user(f"Why {s['answer'].strip()}?") + sgl.assistant(sgl.gen("why"))
    return s.messages()


@sgl.function
def chooses(s, options):
    with s.var_scope("all"):
        s += "pick " + sgl.select("one", choices=[options[0], "none"])
    s["plain"] = [1, 2]
    s.set_var("late", s["one"].upper())
    s += f" {s['late']}{s['plain'][1]} " + sgl.var("one") + sgl.any_order(options, key=str)
    return s.get_meta_info("one")["scores"][0]


@sgl.function
def branches(s):
    s += "p " + sgl.gen("base")
    one, two = s.fork(2)
    one += "1 " + sgl.gen("x")
    two += f"2 {one['x']} {s['base']} " + sgl.gen("y")
    s += f"{two['y']}!" + sgl.gen("z", stop=one["x"])
    with s.copy() as c:
        c += "b " + sgl.gen("w")
    forks = s.fork(2)
    forks += ["one ", "two "]
    forks += sgl.gen("v")
    forks.join()
    forks.join("concate_and_append")
    s += s["w"][0] + f"{s['v'][1]}"


@sgl.function
def appends(s, ending):
    s += "x " + ending
    s += ending


@sgl.function
def votes(s, times):
    s += "Q" + sgl.vote(sgl.gen("a") + "=" + sgl.var("a") + sgl.gen("b"), times)


@sgl.function
async def awaits(s, word):
    s += word + sgl.gen("a")
    s += f"<{await s['a']}>" + sgl.gen("b")
    return await s.text(), (await s.get_meta_info("a"))["finish_reason"]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (chats, {"question": "Tea?"}),
        (chooses, {"options": ["red", "blue"]}),
        (branches, {}),
        (appends, {"ending": " y" + sgl.gen("late")}),
        (appends, {"ending": "text"}),
        (votes, {"times": 2}),
        (awaits, {"word": "hi"}),
    ],
)
def test_a_compiled_run_gives_what_the_interpreted_one_does(program, arguments):
    expected = facts(program.run(**arguments))
    assert facts(program.compile().run(**arguments)) == expected
    assert facts(program.compile(**arguments).run()) == expected
    streamed = program.compile().run(**arguments, stream=True)
    assert "".join(streamed.text_iter()) == expected["text"]


def test_a_compiled_program_writes_on_the_prompt_of_another():
    @sgl.function
    def ask(s, question):
        s += f"Q: {question}" + sgl.gen("answer")
        return s["answer"] + "!"

    compiled = ask.compile()

    @sgl.function
    def plain(s):
        s += "begin "
        return compiled(s, "tea?") + compiled(s, question="why?")

    @sgl.function
    async def native(s):
        s += "begin "
        return await compiled(s, "tea?") + await compiled(s, question="why?")

    state = plain.run()
    assert state.ret_value == "[13]![24]!"
    assert facts(native.run()) == facts(state)
    with pytest.raises(TraceError, match="a compiled program cannot be traced"):
        plain.compile()


def test_a_compiled_program_shows_its_graph_and_can_be_compiled_again(capsys):
    @sgl.function
    def program(s, a, b):
        s += f"{a}{b}"

    @sgl.function
    def any_number(s, *words):
        s += str(words)

    compiled = program.compile(a=1)
    compiled.print_graph()
    assert capsys.readouterr().out == f"{compiled.graph}\n"
    assert "<svg" in compiled._repr_html_()
    assert str(compiled.trace(b=2)) == str(program.trace(b=2))
    assert compiled.compile(b=2).run(a=3).text() == "32"
    with pytest.raises(TypeError, match="takes any number of arguments"):
        any_number.compile("a", "b")


def test_texts_that_are_put_together_for_one_append_are_not_taken_for_those_of_another():
    @sgl.function
    def program(s, a):
        forks = s.fork(8)
        forks += [f"{a}{j}" for j in range(8)]
        forks += lambda j: sgl.gen(f"x{j}")
        return [branch.text()[:1] for branch in forks]

    for _ in range(20):
        assert program.compile().run(a="").ret_value == [*"01234567"]


# --- arguments and errors ------------------------------------------------------------------------


def test_arguments_given_when_compiling_are_fixed():
    @sgl.function
    def program(s, a, n, b="end"):
        for i in range(n):
            s += f"{a}{i} "
        s += b

    compiled = program.compile(n=2)
    assert compiled.run("x").text() == "x0 x1 end"
    assert compiled.run(a="y", b="!").text() == "y0 y1 !"
    with pytest.raises(TypeError, match="n"):
        compiled.run(a="x", n=3)
    with pytest.raises(TypeError, match="a"):
        compiled.run()
    with pytest.raises(TypeError):
        program.compile(unknown=1)


def test_run_raises_the_programs_own_error_unchanged():
    @sgl.function
    def program(s, n):
        s += "x" + sgl.gen("a")
        s += f"{s['a'][99]}"

    @sgl.function
    def divided(s, n):
        s += f"{n[0]}"

    @sgl.function
    def adds(s, end):
        s += "x" + sgl.gen("a", n=2)
        s += f"{s['a'] + end}"

    with pytest.raises(TypeError, match="can only concatenate list"):
        adds.compile(end="").run()
    with pytest.raises(IndexError):
        program.compile().run(n=1)
    with pytest.raises(TypeError, match="not subscriptable"):
        divided.compile().run(n=0)
