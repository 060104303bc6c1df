"""Tracing records what a program appends, has no effect elsewhere, and says where it must stop."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
import sys
import textwrap
import threading
import time
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.ir import RoleBegin, RoleEnd, Text
from sgl_vllm.lang.prefixes import shared_prefix
from sgl_vllm.lang.tracing import recording, trace
from tests.unit.lang.scripted import ScriptedBackend

happened: list[object] = []
PROMPTS = {"en": "Answer: ", "de": "Antwort: "}


def lines(graph, stream=0):
    """The operations of a stream in words."""
    return [str(node) for node in graph.nodes_of(stream)]


def stops(program, *args, **known):
    """The error that ends the program's trace."""
    with pytest.raises(sgl.TraceError) as caught:
        program.trace(*args, **known)
    error = caught.value
    assert (error.filename, error.graph is None) == (__file__, False)
    shown = f"`{error.expression}`: " if error.expression else ""
    assert str(error).startswith(f"{__file__}:{error.line}: {shown}{error.reason}")
    return error


# --- what is recorded ----------------------------------------------------------------------------


@sgl.function
def texts(s, a, b, c="known"):
    s += f"{a}-{b[0]:>4}" + "x" * 2 + a.upper() + c
    s += a + b + sgl.gen("x", max_tokens=b + 1)
    s += "".join([f"[{i}]{a}" for i in range(2)]) + f"{b}!"


@sgl.function
def joins(s):
    forks = s.fork(2)
    forks += sgl.gen("b")
    forks += ["x", "y"]
    forks += lambda i: f"<{i}>"
    forks.join()
    s += s["b"][1] + f"{len(s['b'])}"
    forks.join("concate_and_append")


@sgl.function
async def chats(s, question):
    s.system("Be brief.")
    with s.user():
        s += question
    s += sgl.assistant("Well, " + sgl.gen("answer"))
    with s.var_scope("all"):
        s += await s["answer"]
    s["late"] = [await s.text(), (await s.get_meta_info("answer"))["id"]]


@pytest.mark.parametrize(
    ("program", "streams"),
    [
        (
            texts,
            [
                [
                    "text '{a}-{b[0]:>4}xx{a.upper()}{c}'",
                    "text '{a + b}'",
                    "gen 'x' gen('x', max_tokens=b + 1)",
                    "text '[0]{a}[1]{a}{b}!'",
                ]
            ],
        ),
        (
            joins,
            [
                ["fork(2)", "join 'b'", "text \"{s['b']}2\"", "join of texts"],
                ["gen 'b'", "text 'x'", "text '<0>'"],
                ["gen 'b'", "text 'y'", "text '<1>'"],
            ],
        ),
        (
            chats,
            [
                [
                    *("system_begin", "text 'Be brief.'", "system_end", "user_begin"),
                    *("text '{question}'", "user_end", "assistant_begin", "text 'Well, '"),
                    *("gen 'answer'", "assistant_end", "var_scope 'all'"),
                    *("text \"{s['answer']}\"", "var_scope 'all'", "read the prompt"),
                    "set 'late' = list(s.text(), s.get_meta_info('answer')['id'])",
                ]
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_function_does_to_its_prompts_is_recorded(program, streams):
    graph = program.trace()
    assert [lines(graph, stream.index) for stream in graph.streams] == streams


def test_known_values_are_real_ones():
    @sgl.function
    def program(s, words, tone=None):
        counts = {word: len(word) for word in words}
        words.append("more")
        s += textwrap.dedent(f"  {json.dumps(counts)}\n") + re.sub("a", "A", words[0])
        s += sgl.gen("x", max_tokens=max(counts.values()), stop=sorted(words))

    words = ["tea", "ab"]
    graph = program.trace(words=words)
    assert lines(graph) == ["""text '{"tea": 3, "ab": 2}\\nteA'""", "gen 'x'"]
    assert (graph.parameters, graph.known, words) == (("tone",), ("words",), ["tea", "ab"])


# --- where it stops ------------------------------------------------------------------------------


COMPILED = texts.compile()


@pytest.mark.parametrize(
    ("function", "expression", "reason"),
    [
        (lambda s, a: s["x"] == "yes", 's["x"] == "yes"', "asks s['x'] for its value"),
        (lambda s, a: not a, "not a", "asks the argument 'a' for its value"),
        (lambda s, a: len(s["x"]), 'len(s["x"])', "asks s['x'] for its value"),
        (lambda s, a: str(a), "str(a)", "asks the argument 'a' for its value"),
        (lambda s, a: PROMPTS[a], "PROMPTS[a]", "asks the argument 'a' for its value"),
        (lambda s, a: a.page, "a.page", "asks the argument 'a' for its attribute 'page'"),
        (lambda s, a: f" {a}".strip(), 'f" {a}".strip()', "asks text with a value"),
        (lambda s, a: s.user(f" {a} "[:3]), 's.user(f" {a} "[:3])', "asks text with a value"),
        (lambda s, a: re.sub("x", "y", a), 're.sub("x", "y", a)', "sub() is given a value"),
        (lambda s, a: json.dumps([f"{a}"]), 'json.dumps([f"{a}"])', "dumps() is given a value"),
        (lambda s, a: sgl.gen(a), "sgl.gen(a)", "the name of a variable depends on the argument"),
        (lambda s, a: sgl.tool("t", lambda: a), 'sgl.tool("t", lambda: a)', "the local function"),
        (lambda s, a: s.error(), "s.error()", "whether an operation fails depends on the run"),
        (lambda s, a: s.usage, "s.usage", "this depends on the run"),
        (lambda s, a: s.fork(2).first(bool), "s.fork(2).first(bool)", "this depends on the run"),
        (lambda s, a: s["y"], 's["y"]', "the program raises KeyError"),
        (lambda s, a: s.user(1), "s.user(1)", "TypeError: a program appends strings"),
        (lambda s, a: ", ".join([a]), '", ".join([a])', "the program raises TypeError"),
        (lambda s, a: texts.run("a", "b"), 'texts.run("a", "b")', "a run of its own"),
        (lambda s, a: COMPILED(s, "a", a), 'COMPILED(s, "a", a)', "a compiled program cannot"),
    ],
)
def test_the_trace_ends_where_a_value_is_asked_for_and_says_what_to_do(
    function, expression, reason
):
    @sgl.function
    def program(s, a):
        s += "before " + sgl.gen("x")
        function(s, a)

    error = stops(program)
    assert error.expression == expression
    assert reason in error.reason
    assert lines(error.graph)[:2] == ["text 'before '", "gen 'x'"]
    assert str(error) in str(error.graph)
    if "asks the argument" in reason:
        assert "compile(a=...)" in str(error)
    elif "asks" in reason or "raises TypeError" in reason:
        assert "sgl.tool(...)" in str(error) or "append the text as it is" in str(error)


def test_a_program_that_never_ends_is_stopped(monkeypatch):
    @sgl.function
    def appends(s):
        while True:
            s += "x"

    @sgl.function
    def computes(s):
        while True:
            len("")

    monkeypatch.setattr(recording, "MAX_NODES", 100)
    assert "more than 100 operations" in stops(appends).reason
    monkeypatch.setattr(trace, "MAX_S", 0.05)
    assert "more than 0.05 s" in stops(computes).reason


def test_a_stand_in_that_is_kept_says_so_later():
    kept = []

    @sgl.function
    def program(s, a):
        kept[:] = [a]

    program.trace()
    with pytest.raises(sgl.TraceError, match="asks the argument 'a' for its value"):
        bool(kept[0])
    with pytest.raises(sgl.TraceError, match="asks the argument 'a' for its value"):
        f"{kept[0]}"
    assert repr(kept[0]) == "<a>"


# --- it has no effect ----------------------------------------------------------------------------


class _Counter:
    def __init__(self):
        happened.append("made")


def _imports():
    import antigravity  # noqa: F401


@pytest.mark.parametrize(
    "effect",
    [
        lambda: print("no"),
        lambda: open("/tmp/no", "w"),  # noqa: SIM115
        lambda: happened.append("global"),
        lambda: PROMPTS.update(fr="Réponse"),
        lambda: urllib.request.urlopen("http://127.0.0.1:9"),
        lambda: threading.Thread(target=happened.append, args=("thread",)).start(),
        lambda: time.sleep(60),
        lambda: random.random(),
        lambda: datetime.datetime.now(),
        lambda: exec("happened.append('exec')"),
        lambda: sorted([1, 2], key=lambda x: happened.append(x)),
        lambda: sys.stdout.write("no"),
        lambda: asyncio.new_event_loop(),
        _Counter,
        _imports,
    ],
)
def test_side_effects_do_not_happen_and_end_the_trace(effect, capsys):
    @sgl.function
    def program(s, effect):
        s += "before"
        try:
            effect()
        except Exception:
            s += "caught"

    error = stops(program, effect)
    assert not happened and PROMPTS.keys() == {"en", "de"}
    assert capsys.readouterr().out == ""
    assert lines(error.graph) == ["text 'before'"]
    assert shared_prefix(program, [{"effect": effect}] * 2) == (Text("before"),)
    assert sys.getprofile() is None


def test_the_program_may_change_what_it_made_itself():
    @sgl.function
    def program(s, options):
        parts, seen = [], {}
        for option in options:
            parts.append(f"- {option}\n")
            seen.setdefault(option, len(seen))
        options.clear()
        s += "".join(parts) + f"{seen}"

    assert lines(program.trace(["a", "b"])) == ["""text "- a\\n- b\\n{'a': 0, 'b': 1}\""""]


# --- what a batch shares -------------------------------------------------------------------------


@sgl.function
def chat(s, rules, question, tone="kind"):
    s += sgl.system(f"Be {tone}. {rules}")
    s += sgl.user(f"Question: {question}")
    s += sgl.assistant(sgl.gen("answer"))


@sgl.function
def looks_up(s, language, question):
    s += "Hello. "
    s += PROMPTS[language]
    s += question + sgl.gen("answer")


@sgl.function
def forks(s):
    s += "one "
    s.fork(2)
    s += "two"


def joined(prefix):
    """Turns and texts as one line."""
    return "".join(one.value if isinstance(one, Text) else f"<{one!s}>" for one in prefix)


RULES = (RoleBegin("system"), Text("Be kind. R"), RoleEnd("system"), RoleBegin("user"))


@pytest.mark.parametrize(
    ("program", "items", "prefix"),
    [
        (chat, [{"rules": "R", "question": q} for q in "abc"], (*RULES, Text("Question: "))),
        (looks_up, [{"language": x, "question": "a"} for x in ("en", "de")], (Text("Hello. "),)),
        (looks_up, [{"language": "fr", "question": q} for q in "ab"], (Text("Hello. "),)),
        (looks_up, [{"language": "de", "question": q} for q in "ab"], (Text("Hello. Antwort: "),)),
        (forks, [{}, {}], (Text("one "),)),
    ],
)
def test_the_prefix_is_known_text_and_turns_up_to_what_differs(program, items, prefix):
    assert joined(shared_prefix(program, items)) == joined(prefix)


@given(
    st.lists(
        st.fixed_dictionaries({"rules": st.sampled_from("ab"), "question": st.text(max_size=3)}),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_the_prefix_begins_every_item_s_prompt(items):
    shared = "".join(part.value for part in shared_prefix(chat, items) if isinstance(part, Text))
    for item in items:
        prompt = chat.run(**item, backend=ScriptedBackend()).text()
        assert prompt.startswith(shared)


def test_a_prefix_costs_little_for_many_items():
    items = [{"rules": "r", "question": str(i)} for i in range(10_000)]
    started = time.monotonic()
    assert joined(shared_prefix(chat, items)).endswith("Question: ")
    assert time.monotonic() - started < 1
