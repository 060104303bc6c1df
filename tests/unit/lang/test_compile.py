"""Compiled programs run as the interpreted ones do, and code movement is honest."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import re
import zlib
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.compiler import (
    ReorderError,
    compile_program,
)
from sgl_vllm.lang.ir import Text
from sgl_vllm.lang.planner import model_planner
from sgl_vllm.lang.tracing.frames import TraceError
from sgl_vllm.lang.tracing.trace import shared_prefix
from tests.effort import examples
from tests.unit.lang.conftest import LONG
from tests.unit.lang.random_programs import program_of, sources
from tests.unit.lang.scripted import ScriptedBackend

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
        return compile_program(program, **known)
    except TraceError as error:
        assert isinstance(error.__cause__, LookupError | TypeError | ValueError)
        assert isinstance(expected, str)
        return None


def assert_same(program, **arguments):
    """The compiled run equals the interpreted one; its state is returned."""
    expected = facts(program.run(**arguments))
    compiled = compile_program(program)
    state = compiled.run(**arguments)
    assert facts(state) == expected
    return state


# --- the same as interpreted ---------------------------------------------------------------------


def test_texts_arguments_and_generations_give_the_same():
    @sgl.function
    def program(s, topic, count=3):
        s += f"About {topic}:\n"
        s += "first " + sgl.gen("a") + " second " + sgl.gen("b", max_tokens=count)
        s += f"\n{topic.upper():>8} {count + 1}"

    state = assert_same(program, topic="tea")
    assert state.text() == "About tea:\nfirst [17] second [29]\n     TEA 4"


def test_variables_read_in_the_body_are_used_without_waiting_in_it():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += f"({s['a']} again, {len(s['a'])} long)"
        s += sgl.gen("b", max_tokens=len(s["a"]))
        return s["a"] + s["b"], s.text()

    state = assert_same(program)
    assert state.text() == "x[1]([1] again, 3 long)[23]"
    assert state.ret_value == ("[1][23]", state.text())


def test_fork_keeps_the_prompt_and_join_gathers(server):
    @sgl.function
    def program(s, tips):
        s += LONG
        forks = s.fork(3)
        for i, branch in enumerate(forks):
            branch += f"{i}: "
            branch += tips + sgl.gen("tip")
        forks.join()
        for tip in s["tip"]:
            s += "- " + tip + "\n"
        s += sgl.gen("sum")

    state = assert_same(program, tips="now ")
    assert state["tip"] == [f"[{len(LONG) + 7}]"] * 3
    prompts = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert prompts.count(LONG + "1: now ") == 2  # interpreted, and compiled
    assert len(server.hints) == 2


def test_texts_of_branches_are_joined_too():
    @sgl.function
    def program(s):
        s += "start "
        forks = s.fork(2)
        forks += ["one ", "two "]
        forks += sgl.gen("a")
        forks.join("concate_and_append")
        s += sgl.gen("b")
        return s.text()

    assert assert_same(program).ret_value == "start one [10]two [10][22]"


def test_a_branch_can_read_a_sibling_and_the_parent_its_branches_without_a_join():
    @sgl.function
    def program(s):
        s += "p " + sgl.gen("base")
        one, two = s.fork(2)
        one += "1 " + sgl.gen("x")
        two += f"2 {one['x']} {s['base']} " + sgl.gen("y")
        s += f"{two['y']}!" + sgl.gen("z", max_tokens=len(one["x"]))

    assert_same(program)


def test_chats_are_the_same():
    @sgl.function
    def program(s, question):
        s += sgl.system("Be brief.")
        s.user(question)
        with s.assistant():
            s += "Well, " + sgl.gen("answer")
        s += sgl.user(f"Why {s['answer']}?")
        s += sgl.assistant(sgl.gen("why"))
        return s.messages()

    assert len(assert_same(program, question="Tea?").ret_value) == 5


def test_selects_scopes_set_variables_and_meta_information_are_the_same():
    @sgl.function
    def program(s, options):
        with s.var_scope("all"):
            s += "pick " + sgl.select("one", choices=[*options, "none"])
        s["plain"] = [1, 2]
        s.set_var("late", s["one"].upper())
        s += f" {s['late']}{s['plain'][1]} " + sgl.var("one")
        return s.get_meta_info("one")["scores"][0]

    assert_same(program, options=["red", "blue"])


def test_copies_are_joined_at_the_end_of_their_block():
    @sgl.function
    def program(s):
        s += "a " + sgl.gen("x")
        with s.copy() as c:
            c += "b " + sgl.gen("y")
        s += f"{s['y'][0]}"

    assert_same(program)


def test_tools_run_once_per_run_and_never_when_compiling():
    calls = []

    def look_up(what, times=1):
        calls.append(what)
        return what * times

    @sgl.function
    def program(s, word):
        s += "q " + sgl.gen("a")
        s += sgl.tool("found", look_up, sgl.var("a"), times=2)
        s += sgl.tool("argument", look_up, word)
        s += sgl.tool("read", look_up, s["found"])

    compiled = compile_program(program)
    assert calls == []
    state = compiled.run(word="w")
    assert calls == ["[2]", "w", "[2][2]"]
    assert state.text() == "q [2][2][2]w[2][2]"


def test_an_async_program_compiles_as_a_plain_one_does():
    @sgl.function
    async def program(s, word):
        s += word + sgl.gen("a")
        answer = await s["a"]
        s += f"<{answer}>" + sgl.gen("b")
        return await s.text()

    state = assert_same(program, word="hi")
    compiled = compile_program(program)
    again = asyncio.run(compiled.run_async(word="hi"))
    assert again.ret_value == state.ret_value == "hi[2]<[2]>[10]"


def test_a_compiled_program_writes_on_the_prompt_of_another():
    @sgl.function
    def ask(s, question):
        s += f"Q: {question}" + sgl.gen("answer")
        return s["answer"] + "!"

    compiled = compile_program(ask)

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
        compile_program(plain)


def test_several_reads_can_be_awaited_together():
    @sgl.function
    async def program(s):
        one, two = s.fork(2)
        one += "1" + sgl.gen("a")
        two += "2" + sgl.gen("a")
        answers = await asyncio.gather(one["a"], two["a"])
        s += "".join(answers)

    assert_same(program)


def test_a_compiled_program_shows_its_graph_and_can_be_traced_and_compiled_again(capsys):
    @sgl.function
    def program(s, a, b):
        s += f"{a}{b}"

    compiled = compile_program(program, a=1)
    compiled.print_graph()
    assert capsys.readouterr().out == f"{compiled.graph}\n"
    assert "<svg" in compiled._repr_html_()
    assert str(compiled.trace(b=2)) == str(program.trace(b=2))
    assert compiled.compile(b=2).run(a=3).text() == "32"

    @sgl.function
    def any_number(s, *words):
        s += str(words)

    with pytest.raises(TypeError, match="takes any number of arguments"):
        compile_program(any_number)


def test_programs_within_programs_are_followed():
    @sgl.function
    def ask(s, question, name):
        s += f"Q: {question}\nA:" + sgl.gen(name, stop="\n") + "\n"
        return s[name]

    def both(s, first, second):
        return [ask(s, first, "one"), ask(s, second, name="two")]

    @sgl.function
    def program(s, topic):
        return both(s, topic, f"more on {topic}")

    assert assert_same(program, topic="tea").ret_value == ["[9]", "[30]"]


class _Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class _Point(NamedTuple):
    x: int
    y: int = 2

    @property
    def total(self):
        return self.x + self.y


class _Card:
    greeting = "Hi"

    def __init__(self, name):
        self.name = name
        self.write = _shout

    @staticmethod
    def initial(name):
        return name[:1]

    @classmethod
    def polite(cls, name):
        return f"{cls.greeting} {name}"

    def hello(self, ending="!"):
        return self.polite(self.name) + ending


def _shout(text):
    return text.upper()


CARD, POINT, SIZES = _Card("Ada"), _Point(1), {_Size.SMALL: 1, _Size.LARGE: 9}


def test_plain_python_on_known_values_gives_what_it_gives_when_run():
    @sgl.function
    def program(s, word):
        total: int = 0
        counts, rows = {"a": 1}, [[1, 2], [3]]
        counts["a"] += 1
        rows += [[4]]
        rows[0][1] = 5
        while True:
            total += 1
            if total == 2:
                continue
            if total > 3:
                break
        for row in rows:
            for item in row:
                if item == 3:
                    break
            else:
                s += f"{row}"
        pairs = [(x, y) for x in range(3) if x for y in rows[1] if y > x]
        first, *middle, last = "abcd"  # type: ignore[str-unpack]
        if (size := len(middle)) == 2 and 1 < size <= 2 < 9:
            s += f"{first}{middle}{last}{pairs}"
        s += f"{ {1, 2} | {total} } { {k: -v for k, v in counts.items()} } {[*'ab', *rows]}"
        s += f"{ {**counts, 'b': -total} } {total:>{size}} {f'x-{3}'} {3 in rows[1]}"

        def inner(a, *rest, b=2, **others):
            return f"({a}{rest}{b}{others})"

        s += inner(1, 2, *[3], b=4, c=5) + inner(0) + (lambda *xs: str(xs))(1)
        s += CARD.hello() + CARD.hello(ending="?") + CARD.initial("Bob") + CARD.write("loud")
        s += f"{POINT.x}{POINT[1]}{POINT.total}{list(POINT)}{POINT == (1, 2)}{str.title('ab')}"
        s += "".join(size.value for size in _Size) + f"{SIZES[_Size.LARGE]}{_Size.SMALL is POINT}"  # type: ignore[comparison-overlap]
        s += f"{re.search('b(c)', 'abcd')[1]}{datetime.date.fromisoformat('2024-01-02').year}"  # type: ignore[index]
        s += f"{sorted([3, 1, 2], key=lambda x: -x)}{max(rows, key=len)}{'ab'.join(list('xy'))}"
        rows.sort(key=lambda row: -row[0])
        upper = CARD.name.upper
        assert rows
        s += f"{rows}{upper()}{not total}{-total}{'a' == None}{word if rows else 1 / 0}"

    assert_same(program, word="tea")
    compiled = compile_program(program, word="tea")
    assert len(compiled.graph.nodes) == len(compile_program(program).graph.nodes)
    assert compiled.run().text() == program.run(word="tea").text()


def test_plain_python_on_values_that_only_a_run_knows_gives_what_it_gives_when_run():
    @sgl.function
    def program(s, word, point, options):
        s += sgl.gen("a")
        a, found = s["a"], {}
        head, *_ = "ab"
        one, two = options
        found["a"], found["word"] = a, word
        listed, known = [a, *options, head], [a]
        known.append(word)
        s += f"{found} {listed} {({word: 1, 'x': a})[word]} {point.x}{point[1:]} {options[0][:1]}"
        s += f"{one}{two}{word == a}{a is None}{not a}{-len(a)}{ ({word, 'b'} == {'b', word}) }"
        s += f"{len(listed)}{listed[1]}{word + a}{[a] * 2}{[*known, 1]}{a * 2!r:>9}"
        s += f"{dict(zip('k', [a], strict=True))}{datetime.date(2024, 1, 2):%d.%m.%y}"
        s += " ".join([word, a]) + ", ".join(options) + word.replace("t", a) + f"x{word}"
        s += str({"k": [word]}.get("k")) + str({"k": 1}.get(word, a)) + json.dumps({"w": word})
        for i, (x, y) in enumerate(zip("pq", [a, word], strict=True)):
            s += f"{i}{x}{y}"
        s["pair"] = (a, word)
        s += f"{'pair' in s}{'other' in s}{s['pair'][0]}{len(s.fork(2))}"
        return found, listed, s.get_meta_info("a")["finish_reason"]

    assert_same(program, word="tea", point=POINT, options=["x", "yy"])


def _capital(country: str) -> str:
    """The capital of a country."""
    return "Lima"


def _mapped(document):
    return sgl.var("style") + document + sgl.gen("point")


def _reduced(points):
    return "Sum of " + points + sgl.gen("sum")


def _pair(*words, **named):
    return f"{words}{named}"


def test_variables_by_name_beside_values_that_only_a_run_knows_are_those_of_the_place():
    @sgl.function
    def program(s, document, audio):
        s += "Q" + sgl.gen("style") + "/" + sgl.gen("other")
        style = s["style"]
        s += sgl.any_order([sgl.var("other"), "doc " + style], seed=0)
        s += sgl.any_order("doc " + style, sgl.var("style"), seed=0)
        s += sgl.tool("pair", _pair, sgl.var("other"), document, word=sgl.var("style"))
        s += sgl.tool("again", _pair, style, sgl.var("pair"))
        s += sgl.read_only_tool("read", _pair, style, sgl.var("again"), word=sgl.var("other"))
        s["style"] = style + "!"
        s += sgl.map_reduce("sum", [document, "doc " + style], map=_mapped, reduce=_reduced)
        (branch,) = s.fork(1)
        branch["style"] = "branch"
        s += "\n"
        s += sgl.agent("answer", "T " + sgl.var("style") + style, [_capital], max_turns=1)
        branch += sgl.any_order([sgl.var("style"), style], seed=0)
        return s.text(), branch.text()

    def reply(prompt):
        return '{"calls": []}' if prompt.endswith("Calls: ") else f"[{len(prompt)}]"

    backend = ScriptedBackend(reply=reply)
    expected = facts(program.run("D", "A", backend=backend))
    assert facts(program.compile().run("D", "A", backend=backend)) == expected
    assert "T [1]![1]" in expected["text"]
    assert expected["returned"][1].count("branch") == 1


def test_a_variable_that_is_named_but_not_made_is_told_when_compiling():
    @sgl.function
    def program(s, word):
        s += sgl.any_order([sgl.var("missing"), word])

    with pytest.raises(TraceError, match="the program has no variable 'missing'"):
        program.compile()


def test_a_primitive_may_name_a_variable_that_it_makes_itself():
    @sgl.function
    def program(s, times):
        s += "Q" + sgl.vote(sgl.gen("a") + "=" + sgl.var("a") + sgl.gen("b"), times)

    backend = ScriptedBackend()
    expected = facts(program.run(2, backend=backend))
    assert facts(program.compile().run(2, backend=backend)) == expected


def test_functions_made_in_a_comprehension_see_its_last_item():
    @sgl.function
    def program(s, word):
        functions = [lambda end: f"{i}{j}{end}" for i in range(3) for j in range(i)]  # noqa: B023
        by_name = {name: lambda end: f"{name}{end}" for name in "ab"}  # noqa: B023
        s += functions[0](word) + by_name["a"]("!")
        s += "".join(max("ab", key=lambda c: ord(c) * i) for i in (1, -1))

    state = assert_same(program, word="x")
    assert state.text() == "21xb!ba"


def test_functions_made_by_a_generator_expression_are_refused():
    @sgl.function
    def program(s):
        for function in (lambda end: f"{i}{end}" for i in range(3)):  # noqa: B023
            s += function("x")

    assert program.run(backend=ScriptedBackend()).text() == "0x1x2x"
    with pytest.raises(TraceError, match=r"make a list, \[\.\.\. for \.\.\.\]"):
        program.compile()


def test_an_expression_may_be_an_argument():
    @sgl.function
    def program(s, ending):
        s += "x " + ending

    compiled = compile_program(program)
    state = compiled.run(ending=" y" + sgl.gen("late"))
    assert (state["late"], state.text()) == ("[4]", "x  y[4]")


def test_a_batch_of_a_compiled_program_is_the_batch_of_its_runs():
    @sgl.function
    def program(s, n):
        s += "count " + str(n) + sgl.gen("a")
        s += f"{s['a']}"

    items = [{"n": 10**i} for i in range(20)]
    compiled = compile_program(program)
    texts = [state.text() for state in compiled.run_batch(items)]
    assert texts == [state.text() for state in program.run_batch(items)]


def test_sampling_defaults_and_the_program_s_own_apply(server):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", temperature=0.5) + sgl.gen("b")

    compile_program(program).run(temperature=0.25, max_new_tokens=9)
    first, second = server.bodies("/v1/completions")
    assert (first["temperature"], second["temperature"]) == (0.5, 0.25)
    assert second["max_tokens"] == 9


def test_a_returned_prompt_is_the_state():
    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(2)
        forks += ["1", "2"]
        return s, forks[1]

    root, branch = compile_program(program).run().ret_value
    assert (root.text(), branch.text()) == ("x", "x2")


def test_a_compiled_program_streams():
    @sgl.function
    def program(s):
        s += "x" + sgl.tool("a", str.upper, "y")
        s += f" {s['a']}"

    state = compile_program(program).run(stream=True)
    assert "".join(state.text_iter()) == "xY Y"


@given(sources(), st.text("abct", max_size=5), st.integers(1, 9))
@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_programs_compiled_give_what_they_give_interpreted(
    server, monkeypatch, source, a, k
):
    # Otherwise a call more is counted where a tool takes long on a busy machine.
    monkeypatch.setattr(sgl.global_config, "enable_prefill_during_tools", False)
    server.reply = lambda prompt: f"<{zlib.crc32(prompt.encode()) % 1000}>"
    server.logprob = lambda token, position: -((token * 7 + position) % 5) - 0.125
    note(source.text)
    program = program_of(source.text)
    expected = facts_or_error(lambda: program.run(a=a, k=k))
    ordinary = program_of(source.text.replace("read_only_tool", "tool"))
    assert facts_or_error(lambda: ordinary.run(a=a, k=k)) == expected
    for known, others in (({}, {"a": a, "k": k}), ({"a": a, "k": k}, {})):
        compiled = compiled_unless_it_fails(program, expected, **known)
        if compiled is not None:
            assert facts_or_error(lambda: compiled.run(**others)) == expected  # noqa: B023


# --- arguments and errors ------------------------------------------------------------------------


def test_arguments_given_when_compiling_are_fixed():
    @sgl.function
    def program(s, a, n, b="end"):
        for i in range(n):
            s += f"{a}{i} "
        s += b

    compiled = compile_program(program, n=2)
    assert compiled.run("x").text() == "x0 x1 end"
    assert compiled.run(a="y", b="!").text() == "y0 y1 !"
    with pytest.raises(TypeError, match="n"):
        compiled.run(a="x", n=3)
    with pytest.raises(TypeError, match="a"):
        compiled.run()
    with pytest.raises(TypeError):
        compile_program(program, unknown=1)


def test_bind_gives_more_arguments():
    @sgl.function
    def program(s, a, b):
        s += f"{a}{b}"

    assert compile_program(program).bind(a=1).run(b=2).text() == "12"
    assert compile_program(program.bind(b=3)).run(a=1).text() == "13"


def test_a_program_that_cannot_be_traced_says_so_when_it_is_compiled():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        if s["a"] == "yes":
            s += "!"

    with pytest.raises(TraceError, match=r"s\['a'\] == 'yes'.*decides on s\['a'\]"):
        compile_program(program)


def test_run_raises_the_programs_own_error_unchanged():
    @sgl.function
    def program(s, n):
        s += "x" + sgl.gen("a")
        s += f"{int(s['a'])}"

    @sgl.function
    def divided(s, n):
        s += f"{1 / n}"

    with pytest.raises(ValueError, match="invalid literal"):
        compile_program(program).run(n=1)
    with pytest.raises(ZeroDivisionError):
        compile_program(divided).run(n=0)


def test_a_failed_request_is_the_program_error_of_its_operation(server):
    server.fault = lambda path, body: __import__("fastapi").Response(status_code=400)

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += f"{s['a']}" + sgl.gen("b")

    with pytest.raises(sgl.ProgramError, match="gen 'a'"):
        compile_program(program).run()


# --- code movement -------------------------------------------------------------------------------


@sgl.function
def judge(s, essay, criterion):
    s += f"Essay: {essay}\n"
    s += "You are a fair judge of essays.\n"
    s += f"Judge its {criterion}.\n"
    s += "Answer with a number.\n"
    s += sgl.gen("score")
    s += "\nBecause" + sgl.gen("reason")


def test_constants_come_first_and_the_order_of_all_else_stays():
    reordering = compile_program(judge).reordered()
    assert reordering.order[:4] == (1, 3, 0, 2)
    assert reordering.shared_chars_before == len("Essay: ")
    assert reordering.shared_chars_after == len(
        "You are a fair judge of essays.\nAnswer with a number.\nEssay: "
    )
    assert reordering.program.run(essay="E", criterion="style").text() == (
        "You are a fair judge of essays.\nAnswer with a number.\nEssay: E\nJudge its style.\n"
        "[80]\nBecause[92]"
    )


def test_the_diff_shows_what_moved():
    diff = compile_program(judge).reordered().diff().splitlines()
    assert diff[3:8] == [
        "+You are a fair judge of essays.",
        "+Answer with a number.",
        " Essay: {essay}",
        "-You are a fair judge of essays.",
        " Judge its {criterion}.",
    ]
    assert " [gen 'score']" in diff
    unmoved = compile_program(judge).reordered(lambda pieces: range(len(pieces)))
    assert unmoved.diff() == ""


def test_text_moves_within_its_turn_only():
    @sgl.function
    def program(s, question):
        s += sgl.system("Be brief.")
        with s.user():
            s += f"{question}\n"
            s += "Answer with a number.\n"
        s += sgl.assistant(sgl.gen("answer"))

    reordering = compile_program(program).reordered()
    state = reordering.program.run(question="1+1?")
    assert state.messages()[1]["content"] == "Answer with a number.\n1+1?\n"
    assert reordering.shared_chars_after - reordering.shared_chars_before == 22


def test_a_planner_s_answer_that_is_no_permutation_is_refused():
    compiled = compile_program(judge)
    for answer in ([0, 0, 1, 2, 3, 4, 5, 6], [0], [], list("01234567"), [True, 0, 2, 3, 4, 5, 6]):

        def planner(pieces, answer=answer):
            return answer

        with pytest.raises(ReorderError, match="no permutation"):
            compiled.reordered(planner)


def test_a_planner_s_answer_that_breaks_a_dependency_is_refused():
    @sgl.function
    def program(s, a):
        s += a + "\n"
        s += sgl.gen("x")
        s += f"again {s['x']}"

    with pytest.raises(ReorderError, match="piece 2 before piece 1, which it needs"):
        compile_program(program).reordered(lambda pieces: [2, 0, 1])


def test_a_tool_does_not_move_before_what_the_function_waits_for():
    @sgl.function
    def program(s):
        s += "a"
        s += sgl.gen("ok")
        approved = s["ok"]  # noqa: F841
        s += sgl.tool("pay", len, "x")
        s += sgl.tool("tell", len, "y")

    compiled = compile_program(program)
    with pytest.raises(ReorderError, match="piece 2 before piece 1, which it needs"):
        compiled.reordered(lambda pieces: [0, 2, 1, 3])
    with pytest.raises(ReorderError, match="piece 3 before piece 2"):
        compiled.reordered(lambda pieces: [0, 1, 3, 2])
    moved = compiled.reordered(lambda pieces: [1, 2, 3, 0]).program
    assert moved.run(backend=ScriptedBackend()).text() == "(0)11a"


def test_a_model_can_be_the_planner(server, backend):
    asked = []

    def reply(prompt):
        asked.append(prompt)
        return json.dumps({"order": [1, 3, 2, 0, 4, 5, 6]})

    server.reply = reply
    compiled = compile_program(judge)
    reordering = compiled.reordered(model_planner(backend))
    assert '2 (varies): "Judge its {criterion}.\\n"' in asked[0]
    assert "1 (constant)" in asked[0]
    assert reordering.order[:4] == (1, 3, 2, 0)
    server.reply = lambda prompt: json.dumps({"order": [0] * 7})
    with pytest.raises(ReorderError, match="no permutation"):
        compiled.reordered(model_planner(backend))
    server.reply = lambda prompt: "no JSON"
    with pytest.raises(ReorderError, match="has no order"):
        compiled.reordered(model_planner(backend))


def test_comprehensions_and_sorting_of_known_values_are_computed_when_compiling():
    @sgl.function
    def program(s, documents, top=2):
        s += "\n".join(f"[{i}] {text.strip()}" for i, text in enumerate(documents) if text)
        best = sorted(documents, key=lambda text: (len(text), text), reverse=True)[:top]
        s += f" {best} {sum(len(d) for d in documents)} {max(range(3), key=lambda i: i % top)}"
        s += f"{sorted('cab', key=lambda c: -ord(c))}{min([], key=lambda x: x, default=9)}"
        s += str({d: len(d) + top for d in documents}) + str(sorted({d[0] for d in documents if d}))
        s += "none" if top > 2 and documents[7] else "some"

    documents = ["ab ", "", "cde", "fg "]
    expected = program.run(documents=documents).text()
    compiled = compile_program(program, documents=documents, top=2)
    assert compiled.run().text() == expected
    assert expected.startswith("[0] ab\n[2] cde\n[3] fg ['fg ', 'cde'] 9 1['c', 'b', 'a']9{'ab ")


def test_a_compiled_program_s_batch_shares_what_its_own_order_has_first():
    compiled = compile_program(judge)
    items = [{"essay": "E", "criterion": c} for c in ("style", "spelling")]
    before = compiled._shared_prefix(items)
    assert "".join(part.value if isinstance(part, Text) else str(part) for part in before) == (
        "Essay: E\nYou are a fair judge of essays.\nJudge its "
    )
    after = compiled.reordered().program._shared_prefix(items)
    assert after[:2] == (
        Text("You are a fair judge of essays.\n"),
        Text("Answer with a number.\n"),
    )
    assert shared_prefix(judge, items)[0] == Text("Essay: E\n")


def test_bind_keeps_the_order_of_a_reordered_program():
    program = compile_program(judge).reordered().program.bind(essay="E")
    (state,) = program.run_batch([{"criterion": "style"}])
    assert state.text() == program.run(criterion="style").text()
    assert state.text().startswith("You are a fair judge of essays.\nAnswer with a number.\nEssay")


def test_a_prefix_ends_where_computing_it_fails():
    @sgl.function
    def program(s, n):
        s += "one "
        s += f"{1 / n} two"

    assert compile_program(program)._shared_prefix([{"n": 0}, {"n": 0}]) == (Text("one "),)
