"""Tracing finds what a program does, executes nothing of it, and says where it must stop."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import textwrap
import threading
import time
import typing
import urllib.request
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.ir import Gen, RoleBegin, RoleEnd, Text
from sgl_vllm.lang.tracing.deferred import Arguments, Definition
from sgl_vllm.lang.tracing.evaluation import MAX_STEPS
from sgl_vllm.lang.tracing.frames import TraceError
from sgl_vllm.lang.tracing.nodes import Evaluate, Fork, Join, Write
from sgl_vllm.lang.tracing.operations import function_named
from sgl_vllm.lang.tracing.trace import shared_prefix, trace

happened = []
PROMPTS = {"en": "Answer: ", "de": "Antwort: "}
SHOTS = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]


def texts(graph, stream=0):
    """The texts of a stream, with what is deferred in braces."""
    operations = [node.operation for node in graph.nodes_of(stream)]
    return "".join(
        piece if isinstance(piece, str) else "{" + piece.source + "}"
        for operation in operations
        if isinstance(operation, Write)
        for piece in operation.pieces
    )


def pieces(node):
    """The pieces of text that a node writes."""
    assert isinstance(node.operation, Write)
    return node.operation.pieces


def edges(graph):
    """Which node reads what of which: (writer, reader, name)."""
    return {(read.node, node.index, read.name) for node in graph.nodes for read in node.reads}


def stops(program, **known):
    """The error that ends the program's trace."""
    with pytest.raises(TraceError) as caught:
        trace(program, **known)
    assert caught.value.graph is not None
    assert caught.value.filename == __file__
    assert f"{__file__}:{caught.value.line}: " in str(caught.value)
    assert caught.value.expression in str(caught.value)
    return caught.value


# --- nothing is executed -------------------------------------------------------------------------


class _Loud:
    def __init__(self):
        self.name = "plain"

    def __str__(self):
        happened.append("str")
        return "loud"

    __repr__ = __format__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __add__ = (  # type: ignore[assignment]
        lambda *args: happened.append("called")
    )

    def __hash__(self):
        happened.append("hash")
        return 1

    @property
    def shout(self):
        happened.append("property")
        return "!"

    def method(self):
        happened.append("method")

    def __getattr__(self, name):
        happened.append(name)
        raise AttributeError(name)


LOUD = _Loud()


@sgl.function
def prints(s):
    s += "before"
    print("no")


@sgl.function
def writes_a_file(s, path):
    s += "before"
    with open(path, "w") as file:
        file.write("no")


@sgl.function
def appends_to_a_global(s):
    s += "before"
    happened.append("global")


@sgl.function
def extends_a_global(s):
    s += "before"
    global happened
    happened += ["global"]


@sgl.function
def rebinds_a_global(s):
    s += "before"
    global happened
    happened = ["global"]


@sgl.function
def sets_an_item_of_a_global(s):
    s += "before"
    PROMPTS["fr"] = "Réponse"


@sgl.function
def sets_an_attribute(s):
    s += "before"
    LOUD.name = "changed"


@sgl.function
def asks_the_network(s):
    s += "before"
    s += urllib.request.urlopen("http://127.0.0.1:9").read()


@sgl.function
def starts_a_thread(s):
    s += "before"
    threading.Thread(target=lambda: happened.append("thread")).start()


@sgl.function
def sleeps(s):
    s += "before"
    time.sleep(60)


@sgl.function
def formats_a_foreign_object(s):
    s += "before"
    s += f"{LOUD}"


@sgl.function
def makes_text_of_a_foreign_object(s):
    s += "before"
    s += str([LOUD])


@sgl.function
def compares_a_foreign_object(s):
    s += "before"
    s += "same" if LOUD == 1 else "other"


@sgl.function
def asks_a_foreign_object_for_its_truth(s):
    s += "before"
    if LOUD:
        s += "true"


@sgl.function
def iterates_over_a_foreign_object(s):
    s += "before"
    for part in LOUD:
        s += part


@sgl.function
def calls_a_function_that_does_it(s):
    s += "before"
    _does_it()


def _does_it():
    return [happened.append("nested") for _ in range(1)]


@sgl.function
def raises_it_in_a_default(s):
    s += "before"

    def inner(x=print("no")):  # noqa: B008
        return x

    inner()


@sgl.function
def imports_a_module(s):
    s += "before"
    import antigravity  # noqa: F401


@sgl.function
def uses_exec(s):
    s += "before"
    exec("happened.append('exec')")


@sgl.function
def calls_through_an_argument(s, f=lambda: happened.append("argument")):
    s += "before"
    f.__call__()


@sgl.function
def sorts_with_a_loud_key(s):
    s += "before"
    sorted([1, 2], key=lambda x: happened.append(x))


@sgl.function
def substitutes_with_a_loud_function(s):
    s += "before"
    s += re.compile("a").sub(_loud_substitute, "banana")


@sgl.function
def adds_to_a_set(s):
    s += "before"
    found = {1}
    found.update([LOUD])


@sgl.function
def updates_a_dict(s):
    s += "before"
    found = {}
    found.update([(LOUD, 1)])


@sgl.function
def sorts_by_loud_keys(s):
    s += "before"
    sorted([1, 2], key=lambda x: LOUD)


def _loud_substitute(found):
    happened.append(found)
    return ""


@sgl.function
def runs_another_program(s):
    s += "before"
    s += prints.run().text()


@sgl.function
def sorts_by_printing(s):
    s += "before"
    sorted(["a", "b"], key=print)


@sgl.function
def sorts_by_making_objects(s):
    s += "before"
    sorted(["a", "b"], key=_Making)


@sgl.function
def makes_an_object(s):
    s += "before"
    _Making("a")


@sgl.function
def raises_an_error_with_code(s):
    s += "before"
    raise _LoudError("a")


@sgl.function
def looks_up_an_enum_with_code(s):
    s += "before"
    _LoudEnum("c")


@sgl.function
def asks_a_class_with_code(s):
    s += "before"
    isinstance(1, _LoudClass)


@sgl.function
def reads_a_property(s):
    s += "before"
    s += LOUD.shout


@sgl.function
def calls_a_foreign_object(s):
    s += "before"
    LOUD.missing()


@sgl.function
def iterates_over_a_loud_text(s):
    s += "before"
    for letter in LOUD_TEXT:
        s += letter


@sgl.function
def formats_a_loud_tuple(s):
    s += "before"
    s += f"{LOUD_TUPLE}"


@sgl.function
def reads_an_attribute_with_code(s):
    s += "before"
    s += LOUD_LOOKUP.name


@sgl.function
def chooses_from_a_foreign_object(s):
    s += "before"
    s += sgl.select("x", choices=LOUD)


class _Making:
    def __init__(self, value):
        happened.append(value)


class _LoudError(Exception):
    def __init__(self, value):
        happened.append(value)


class _LoudEnum(enum.Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value):
        happened.append(value)
        return cls.A


class _LoudMeta(type):
    def __instancecheck__(cls, instance):
        happened.append(instance)
        return True


class _LoudClass(metaclass=_LoudMeta):
    pass


class _LoudText(str):
    def __iter__(self):
        happened.append("iter")
        return iter("x")


class _LoudTuple(typing.NamedTuple):
    a: int = 1

    def __str__(self):
        happened.append("str")
        return "loud"


class _LoudLookup:
    name = "x"

    def __getattribute__(self, name):
        if name != "__class__":  # which every isinstance asks for
            happened.append(name)
        return object.__getattribute__(self, name)


LOUD_TEXT, LOUD_TUPLE, LOUD_LOOKUP = _LoudText("abc"), _LoudTuple(), _LoudLookup()


@pytest.mark.parametrize(
    "program",
    [
        sorts_by_printing,
        sorts_by_making_objects,
        makes_an_object,
        raises_an_error_with_code,
        looks_up_an_enum_with_code,
        asks_a_class_with_code,
        reads_a_property,
        calls_a_foreign_object,
        iterates_over_a_loud_text,
        formats_a_loud_tuple,
        reads_an_attribute_with_code,
        chooses_from_a_foreign_object,
        prints,
        writes_a_file,
        appends_to_a_global,
        extends_a_global,
        rebinds_a_global,
        sets_an_item_of_a_global,
        sets_an_attribute,
        asks_the_network,
        starts_a_thread,
        sleeps,
        formats_a_foreign_object,
        makes_text_of_a_foreign_object,
        compares_a_foreign_object,
        asks_a_foreign_object_for_its_truth,
        iterates_over_a_foreign_object,
        calls_a_function_that_does_it,
        raises_it_in_a_default,
        imports_a_module,
        uses_exec,
        calls_through_an_argument,
        sorts_with_a_loud_key,
        substitutes_with_a_loud_function,
        sorts_by_loud_keys,
        adds_to_a_set,
        updates_a_dict,
        runs_another_program,
    ],
    ids=lambda program: program.__name__,
)
def test_side_effects_are_not_executed_and_end_the_trace(program, tmp_path, capsys):
    happened.clear()
    path = tmp_path / "file"
    known = {"path": str(path)} if "path" in program.arg_names else {}
    started = time.monotonic()
    error = stops(program, **known)
    assert time.monotonic() - started < 5
    assert happened == []
    assert capsys.readouterr().out == ""
    assert not path.exists()
    assert PROMPTS.keys() == {"en", "de"}
    assert LOUD.name == "plain"
    assert texts(error.graph) == "before"
    assert shared_prefix(program, [known, known]) == (Text("before"),)


def test_the_message_says_what_where_and_what_to_do_instead():
    error = stops(prints)
    assert error.expression == "print('no')"
    assert "calling print may have side effects" in str(error)
    assert "sgl.tool" in str(error)


# --- what is not supported -----------------------------------------------------------------------


@sgl.function
def tries(s, text):
    s += "before"
    try:
        s += str(int(text))
    except ValueError:
        s += "none"


@sgl.function
def imports(s):
    s += "before"
    import json

    s += json.dumps(1)


@sgl.function
def imports_from(s):
    s += "before"
    from json import dumps

    s += dumps(1)


@sgl.function
def assigns_an_outer_name(s):
    s += "before"
    total = 0

    def add():
        nonlocal total
        total += 1

    add()


@sgl.function
def deletes(s):
    s += "before"
    counts = {"a": 1}
    del counts["a"]


@sgl.function
def matches(s, text):
    s += "before"
    match text:
        case _:
            s += "any"


@sgl.function
def defines_a_class(s):
    s += "before"

    class Point:
        pass


@sgl.function
def decorates(s):
    s += "before"

    @str
    def inner():
        pass


@sgl.function
def yields(s):
    def words():
        yield "a word"

    s += "before"
    for word in words():
        s += word


@sgl.function
def raises(s):
    s += "before"
    raise ValueError


@sgl.function
def sorts_by_a_lambda(s, words):
    s += "before"
    s += str(sorted(words, key=lambda word: len(word)))


@sgl.function
def sorts_by_answers(s):
    s += "before"
    forks = s.fork(2)
    forks += sgl.gen("a")
    s += str(max(range(2), key=lambda i: len(forks[i]["a"])))


@sgl.function
def substitutes_by_a_function(s):
    s += "before"
    s += re.sub("a", lambda found: found[0].upper(), "banana")


@sgl.function
def iterates_in_a_comprehension(s, words):
    s += "before"
    s += ", ".join(word.strip() for word in words)


@sgl.function
def chooses_a_text(s, words):
    s += "before"
    s += "some" if words else "none"


@sgl.function
def chooses_by_or(s, text):
    s += "before"
    s += text or "none"


@pytest.mark.parametrize(
    ("program", "reason", "advice"),
    [
        (tries, "try is not supported", "catch the error in a function that sgl.tool"),
        (imports, "import is not supported", "import it at the top of the file"),
        (imports_from, "import is not supported", "import it at the top of the file"),
        (assigns_an_outer_name, "nonlocal is not supported", "return the value instead"),
        (rebinds_a_global, "global is not supported", "return the value instead"),
        (deletes, "del is not supported", "make a new list or dict without the item"),
        (matches, "match is not supported", "write it with if and elif"),
        (defines_a_class, "class is not supported", "define it outside"),
        (decorates, "a decorator is not supported", "without compiling"),
        (yields, "Yield is not supported", "without compiling"),
        (raises, "the program raises an error", ""),
        (sorts_by_a_lambda, "supported only as the `key` of known values", "sgl.tool"),
        (sorts_by_answers, "supported only as the `key` of known values", "sgl.tool"),
        (substitutes_by_a_function, "supported only as the `key` of known values", "sgl.tool"),
        (iterates_in_a_comprehension, "decides on the argument 'words'", "compile(words=...)"),
        (chooses_a_text, "decides on the argument 'words'", "compile(words=...)"),
        (chooses_by_or, "decides on the argument 'text'", "compile(text=...)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_supported_ends_the_trace_with_its_place_and_an_alternative(
    program, reason, advice
):
    error = stops(program)
    assert reason in error.reason
    assert advice in str(error)
    assert error.line > program.func.__code__.co_firstlineno
    assert texts(error.graph) == "before"
    assert shared_prefix(program, [{}, {}]) == (Text("before"),)


# --- fault 3: what a program looks up ------------------------------------------------------------


@sgl.function
def looks_up(s, language, question):
    s += "Hello. "
    s += PROMPTS[language]
    s += question + sgl.gen("answer")


def test_looking_up_an_argument_does_not_escape_as_a_key_error():
    assert texts(trace(looks_up)) == "Hello. {PROMPTS[language]}{question}"
    assert texts(trace(looks_up, "de")) == "Hello. Antwort: {question}"
    items = [{"language": "en", "question": "a"}, {"language": "de", "question": "b"}]
    assert shared_prefix(looks_up, items) == (Text("Hello. "),)


def test_a_key_that_is_not_there_is_a_trace_error_and_no_prefix_problem():
    error = stops(looks_up, language="fr")
    assert isinstance(error.__cause__, KeyError)
    assert "the program raises KeyError" in str(error)
    items = [{"language": "fr", "question": q} for q in "ab"]
    assert shared_prefix(looks_up, items) == (Text("Hello. "),)


# --- decisions -----------------------------------------------------------------------------------


def test_a_decision_on_what_the_model_answers_ends_the_trace_and_names_it():
    @sgl.function
    def program(s, topic):
        s += f"About {topic}? " + sgl.select("yes", [" yes", " no"])
        if s["yes"].strip() == "yes":
            s += "Go on."

    error = stops(program)
    assert "the program decides on s['yes']" in str(error)
    assert texts(error.graph) == "About {topic}? "


def test_a_decision_on_an_argument_says_to_give_it():
    @sgl.function
    def program(s, n):
        for i in range(n):
            s += f"{i}"

    assert "compile(n=...)" in str(stops(program))
    assert texts(trace(program, n=3)) == "012"


def test_a_program_that_never_ends_is_stopped():
    @sgl.function
    def program(s):
        while True:
            s.sync()

    assert f"more than {MAX_STEPS} steps" in str(stops(program))
    assert shared_prefix(program, [{}, {}]) == ()


def test_recursion_is_bounded():
    def deeper(s):
        s += "x"
        deeper(s)

    @sgl.function
    def program(s):
        deeper(s)

    assert "deep" in str(stops(program))


def test_source_that_is_not_there_is_said():
    namespace: dict[str, typing.Any] = {"sgl": sgl}
    exec("@sgl.function\ndef program(s):\n    s += 'x'", namespace)
    with pytest.raises(TraceError, match="source of program is not available"):
        trace(namespace["program"])
    assert shared_prefix(namespace["program"], [{}]) == ()


def test_source_that_changed_since_it_was_imported_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "changing_program.py"
    path.write_text("import sgl_vllm as sgl\n@sgl.function\ndef program(s):\n    s += 'old'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import changing_program  # type: ignore[import-not-found]

    path.write_text("import sgl_vllm as sgl\n@sgl.function\ndef program(s):\n    s += 'newer'\n")
    with pytest.raises(TraceError, match="has changed since it was loaded"):
        trace(changing_program.program)


# --- what is understood --------------------------------------------------------------------------


class Tone(enum.Enum):
    KIND = "kind"


@dataclasses.dataclass
class Document:
    title: str
    pages: list[str]

    def heading(self, level=1):
        return "#" * level + " " + self.title

    @property
    def size(self):
        return len(self.pages)


DOCUMENT = Document("Tea", ["one", "two"])


def test_plain_python_on_known_values_is_evaluated():
    @sgl.function
    def program(s, question):
        shots = [f"Q: {shot['q']} A: {shot['a']}" for shot in SHOTS if shot["a"] != "9"]
        s += "\n".join(shots) + "\n"
        total, (first, *rest) = 0, "abc"
        for i, (key, value) in enumerate(sorted(PROMPTS.items()), start=1):
            if i == 3:
                break
            total += len(value)
            s += f"{i}:{key!r}:{value.strip():>10}|"
        else:
            s += "done "
        while total > 5:
            total -= 5
            continue
        seen = {}
        for letter in "abca":
            seen[letter] = seen.get(letter, 0) + 1
        seen.update(z=0)
        seen.pop("z")
        s += f"{total} {first}{rest} {json.dumps(seen)} "
        s += textwrap.dedent("  in\n  out ") + DOCUMENT.heading(level=2) + str(DOCUMENT.size)
        s += (lambda x, *, y=2: f" {x * y} ")(4) + Tone.KIND.value + Tone["KIND"].name
        s += f" {question}" if not (1 < 2 < 3) else " chained"

    assert texts(trace(program)) == (
        "Q: 1+1 A: 2\nQ: 2+2 A: 4\n1:'de':  Antwort:|2:'en':   Answer:|done "
        '2 a[\'b\', \'c\'] {"a": 2, "b": 1, "c": 1} in\nout ## Tea2 8 kindKIND chained'
    )


def test_expressions_of_arguments_are_kept_as_they_are_written():
    @sgl.function
    def program(s, a, b):
        s += f"{a}-{b[0]}" + "x" * 2 + a.upper() + json.dumps({"k": [b]})
        s += a + b + sgl.gen("x", max_tokens=b)

    assert texts(trace(program)) == "{a}-{b[0]}xx{a.upper()}{json.dumps({'k': [b]})}{a + b}"


def test_branches_are_streams_with_their_parents():
    @sgl.function
    def program(s):
        s += "root "
        for i, branch in enumerate(s.fork(2)):
            branch += f"{i} " + sgl.gen("a")
            branch.fork(1)[0].user("deep")
        s += "end"

    graph = trace(program)
    assert [(x.parent, x.branch) for x in graph.streams] == [
        (None, 0),
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
    ]
    assert texts(graph, 2) == "1 "
    assert [str(node) for node in graph.nodes_of(3)] == [
        "user_begin",
        "text 'deep'",
        "user_end",
    ]


def test_edges_go_from_where_a_variable_is_made_to_where_it_is_used():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        forks = s.fork(2)
        forks += sgl.gen("b")
        forks.join()
        s += s["b"][1] + s["a"]
        s += sgl.var("a")

    graph = trace(program)
    made = {node.writes[0].name: node.index for node in graph.nodes_of(0)[:1] if node.writes}
    gens = [graph.nodes_of(stream.index)[0].index for stream in graph.streams[1:]]
    join = next(node for node in graph.nodes if isinstance(node.operation, Join))
    uses = [node.index for node in graph.nodes if node.index > join.index]
    assert edges(graph) == {
        (gens[0], join.index, "b"),
        (gens[1], join.index, "b"),
        (gens[1], uses[0], "b"),
        (made["a"], uses[0], "a"),
        (made["a"], uses[1], "a"),
    }
    assert all(writer < reader for writer, reader, _ in edges(graph))


def test_a_variable_means_what_it_meant_where_it_was_read():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        first = s["a"]
        s += sgl.gen("a")
        s += first

    graph = trace(program)
    assert edges(graph) == {(0, 2, "a")}


def test_an_unknown_variable_is_named_with_the_known_ones():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        s += s["b"]

    assert "no variable 'b' (it has: 'a')" in str(stops(program))


def test_what_depends_on_the_run_itself_is_refused():
    @sgl.function
    def counts(s):
        s += str(s.usage.calls)

    @sgl.function
    def chooses(s):
        forks = s.fork(2)
        forks.first(lambda branch: True)

    @sgl.function
    def catches(s):
        s += sgl.gen("a")
        s += str(s.error())

    for program in (counts, chooses, catches):
        stops(program)


def test_a_misuse_of_the_language_is_named_where_it_stands():
    @sgl.function
    def writes_a_number(s, word):
        s += 1

    @sgl.function
    def formats_an_expression(s, word):
        s += f"{sgl.gen('a')}"

    @sgl.function
    def enters_a_turn_with_content(s, word):
        with s.user("hi"):
            pass

    @sgl.function
    def names_a_variable_by_an_argument(s, word):
        s += sgl.gen(word)

    @sgl.function
    def reads_a_variable_named_by_an_argument(s, word):
        s += s[word]

    @sgl.function
    def forks_into_less_than_nothing(s, word):
        s.fork(-1)

    @sgl.function
    def forks_by_an_argument(s, word):
        s.fork(len(word))

    @sgl.function
    def gives_a_fork_too_few_texts(s, word):
        forks = s.fork(2)
        forks += ["a"]

    @sgl.function
    def replaces_a_branch(s, word):
        forks = s.fork(2)
        forks[0] = s

    @sgl.function
    def joins_in_an_unknown_mode(s, word):
        s.fork(2).join("all")

    @sgl.function
    def joins_with_too_much(s, word):
        s.fork(2).join("gather_variable", 2)

    @sgl.function
    def subtracts_from_the_prompt(s, word):
        s -= "a"

    @sgl.function
    def calls_with_too_much(s, word):
        _write(s, "a", "b")

    @sgl.function
    def calls_an_argument(s, word):
        word("a")

    @sgl.function
    def uses_an_undefined_name(s, word):
        s += nothing  # noqa: F821

    @sgl.function
    def uses_a_missing_attribute(s, word):
        s += DOCUMENT.author

    @sgl.function
    def iterates_over_a_number(s, word):
        for digit in 5:
            s += digit

    @sgl.function
    def gives_a_turn_too_much(s, word):
        s.user("a", "b")

    @sgl.function
    def returns_a_function(s, word):
        return lambda: word

    @sgl.function
    def returns_the_branches(s, word):
        return s.fork(2)

    @sgl.function
    def unpacks_too_little(s, word):
        a, b = [1]
        s += a + b

    @sgl.function
    def separates_reasoning_of_an_argument(s, word):
        s += sgl.separate_reasoning("Q: " + word)

    expected = {
        writes_a_number: "TypeError: a program appends strings and expressions",
        formats_an_expression: "an expression is not text",
        enters_a_turn_with_content: "takes no with block",
        names_a_variable_by_an_argument: "the name of a variable depends on the argument 'word'",
        reads_a_variable_named_by_an_argument: "the name of a variable depends on",
        forks_into_less_than_nothing: "fork needs a number of branches, not -1",
        forks_by_an_argument: "decides on the argument 'word'",
        gives_a_fork_too_few_texts: "1 values for 2 branches",
        replaces_a_branch: "a branch cannot be replaced",
        joins_in_an_unknown_mode: "join mode must be",
        joins_with_too_much: "join takes one argument",
        subtracts_from_the_prompt: "supports no augmented assignment but +=",
        calls_with_too_much: "_write() too many positional arguments",
        calls_an_argument: "the called function is the argument 'word', which is unknown",
        uses_an_undefined_name: "name 'nothing' is not defined",
        uses_a_missing_attribute: "'Document' object has no attribute 'author'",
        iterates_over_a_number: "'int' object is not iterable",
        gives_a_turn_too_much: "too many positional arguments",
        returns_a_function: "<lambda> is not supported as a value that a run needs",
        returns_the_branches: "the group of branches is no value",
        unpacks_too_little: "1 values to unpack into 2 names",
        separates_reasoning_of_an_argument: "separate_reasoning of values that only a run knows",
    }
    for program, reason in expected.items():
        assert reason in stops(program).reason, program.func.__name__


def test_the_steps_of_the_function_are_what_it_waits_for_and_computes():
    @sgl.function
    def program(s, word):
        one, two = s.fork(2)
        one += "Q" + sgl.gen("x")
        two += sgl.tool("early", len, "") + sgl.gen("y")
        int(one["x"])
        one["x"]
        two.sync()
        s += sgl.select("z", ["a", "b"]) + sgl.var("z") + f"{word}"
        two += sgl.tool("late", len, "")
        s["pair"] = [one["x"], word]

    graph = trace(program)
    steps = [str(step) if isinstance(step, Definition) else step.source for step in graph.steps]
    assert steps == ["s['x']", "int(one['x'])", "the prompt's text", "word"]
    tools = [node for node in graph.nodes if str(node).startswith("tool")]
    assert [node.num_steps for node in tools] == [0, 4]


def test_mutable_values_are_taken_as_they_are_where_they_are_used():
    @sgl.function
    def program(s, a):
        parts = [a]
        s += ",".join(parts)
        parts.append("more")
        s += ",".join(parts)

    graph = trace(program)
    first, second = (pieces(node)[0] for node in graph.nodes)
    values = Arguments({"a": "x"})
    assert (values.value(first), values.value(second)) == ("x", "x,more")


# --- what a batch shares -------------------------------------------------------------------------


@sgl.function
def chat(s, rules, question, tone="kind"):
    s += sgl.system(f"Be {tone}. {rules}")
    s += sgl.user(f"Question: {question}")
    s += sgl.assistant(sgl.gen("answer"))


def test_the_prefix_has_turns_and_arguments_that_all_share_and_heads_of_texts():
    items = [{"rules": "No lies.", "question": q} for q in ("a", "b", "c")]
    assert shared_prefix(chat, items) == (
        RoleBegin("system"),
        Text("Be kind. No lies."),
        RoleEnd("system"),
        RoleBegin("user"),
        Text("Question: "),
    )


def test_a_default_that_one_item_overrides_is_not_shared():
    items = [{"rules": "r", "question": "a"}, {"rules": "r", "question": "a", "tone": "curt"}]
    assert shared_prefix(chat, items) == (RoleBegin("system"), Text("Be "))


def test_bound_arguments_are_shared():
    prefix = shared_prefix(chat.bind(rules="R"), [{"question": "a"}, {"question": "b"}])
    assert Text("Be kind. R") in prefix


def test_equal_arguments_are_compared_without_their_own_code():
    happened.clear()
    assert shared_prefix(looks_up, [{"language": LOUD, "question": LOUD}] * 2) == (Text("Hello. "),)
    assert happened == []


def test_the_prefix_ends_at_the_first_generation_or_fork():
    @sgl.function
    def generates(s):
        s += "one " + sgl.gen("a") + " two"
        raise RuntimeError

    @sgl.function
    def forks(s):
        s += "one "
        s.fork(2)
        s += "two"

    assert shared_prefix(generates, [{}, {}]) == (Text("one "),)
    assert shared_prefix(forks, [{}, {}]) == (Text("one "),)


def test_the_prefix_goes_up_to_a_text_that_only_a_run_can_decide_on():
    @sgl.function
    def chooses(s, hint):
        s += f"Rules. {'Hint: ' + hint if hint else ''} Go."

    @sgl.function
    def lists(s, documents):
        s += sgl.system("Rules.")
        s += sgl.user("Documents:\n" + "\n".join(text.strip() for text in documents))

    @sgl.function
    def writes_in_a_choice(s, hint):
        s += "Rules."
        _write(s, hint) if hint else None
        s += "Go."

    @sgl.function
    def writes_in_a_comprehension(s, documents):
        s += "Rules."
        [_write(s, text) for text in documents]
        s += "Go."

    items = [{"hint": "a"}, {"hint": ""}]
    assert shared_prefix(chooses, items) == (Text("Rules. "),)
    assert shared_prefix(writes_in_a_choice, items) == (Text("Rules."),)
    lists_of_one = [{"documents": ["a"]}, {"documents": ["b"]}]
    system = (RoleBegin("system"), Text("Rules."), RoleEnd("system"))
    assert shared_prefix(lists, lists_of_one) == (*system, RoleBegin("user"), Text("Documents:\n"))
    assert shared_prefix(writes_in_a_comprehension, lists_of_one) == (Text("Rules."),)


def _write(s, text):
    s += text


def test_a_prefix_costs_little_for_many_items():
    items = [{"rules": "r", "question": str(i)} for i in range(10_000)]
    started = time.monotonic()
    assert len(shared_prefix(chat, items)) == 5
    assert time.monotonic() - started < 1


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
        graph = trace(chat, **item, tone="kind")
        assert texts(graph).startswith(shared)


# --- shown ---------------------------------------------------------------------------------------


@sgl.function
def shown(s, topic):
    s += f"<b>&{topic}</b>\x00"
    forks = s.fork(2)
    forks += sgl.gen("tip]]><script>")
    forks.join()
    s += s["tip]]><script>"][0]


def test_the_text_names_every_operation_and_where_it_reads():
    shown_text = str(trace(shown))
    assert shown_text.splitlines()[0] == "program shown(topic)"
    assert "fork(2) -> streams 1, 2" in shown_text
    assert "join <- streams 1, 2" in shown_text
    assert "[tip]]><script> of 2]" in shown_text
    assert "stream 2 (fork[1] of stream 0)" in shown_text


def test_the_picture_is_well_formed_and_escapes_what_programs_say():
    graph = trace(shown)
    svg = graph.to_svg()
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "<script>" not in svg
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and e.get("rx")]
    assert len(boxes) == len(graph.nodes)
    curves = [e for e in root.iter() if e.get("class") == "edge"]
    reads = [len(n.reads) for n in graph.nodes if not isinstance(n.operation, Join)]
    assert len(curves) == sum(reads)
    assert "prefers-color-scheme: dark" in svg
    assert graph._repr_svg_() == svg


def test_boxes_do_not_overlap_and_nothing_is_outside_of_the_picture():
    root = ElementTree.fromstring(trace(shown).to_svg())
    rects = [e for e in root.iter() if e.tag.endswith("rect") and e.get("rx")]
    places = [tuple(int(e.attrib[k]) for k in ("x", "y", "width", "height")) for e in rects]
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    for i, (x, y, w, h) in enumerate(places):
        assert x + w <= width and y + h <= height
        for x2, y2, w2, h2 in places[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_the_page_stands_alone_and_can_be_written(tmp_path):
    path = tmp_path / "graph.html"
    page = trace(shown).to_html(path)
    assert path.read_text(encoding="utf-8") == page
    assert "<script>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_graph_of_very_many_branches_is_drawn_in_part():
    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(500)
        forks += sgl.gen("a")

    graph = trace(program)
    assert len(graph.streams) == 501
    assert isinstance(graph.nodes[1].operation, Fork)
    assert isinstance(graph.nodes[2].operation, Evaluate)
    assert isinstance(graph.nodes[2].operation.expr, Gen)
    svg = graph.to_svg()
    assert "and 461 more streams" in svg
    ElementTree.fromstring(svg)


# --- described -----------------------------------------------------------------------------------


class _Answer(enum.Enum):
    YES = " yes"
    NO = " no"


def _look_up(word, times):
    return word * times


@sgl.function
def described(s, topic, count):
    s += sgl.system("Be brief.")
    with s.user():
        s += f"About {topic.upper():>8}: " + sgl.select("known", _Answer)
    s += sgl.assistant(sgl.gen("a", max_tokens=count + 1, stop=["\n"]))
    forks = s.fork(2)
    forks += sgl.gen("b", temperature=0.5)
    forks.join()
    s["pair"] = [s["b"][0], {"k": topic}]
    s += sgl.tool("found", _look_up, sgl.var("a"), times=2)
    return s["pair"], s.text()


def test_a_graph_is_described_as_plain_data_whose_values_are_named_operations():
    description = trace(described).as_dict()
    assert json.loads(json.dumps(description)) == description
    assert description["parameters"] == ["topic", "count"]
    assert [node["operation"]["type"] for node in description["nodes"]].count("Evaluate") == 11
    for index, value in enumerate(description["values"]):
        given = [*value.get("args", ()), *value.get("kwargs", {}).values()]
        references = [arg["value"] for arg in given if isinstance(arg, dict) and "value" in arg]
        assert all(reference < index for reference in references)
        assert value["operation"] == "leaf" or callable(function_named(value["operation"]))
    text = next(v for v in description["values"] if v["operation"] == "format")
    upper = description["values"][text["args"][0]["value"]]
    assert upper["operation"] == ".upper"
    topic = description["values"][upper["args"][0]["value"]]
    assert topic["leaf"] == {"type": "Argument", "name": "topic"}


def test_a_description_names_functions_and_refuses_other_objects():
    description = json.dumps(trace(described).as_dict())
    assert f"{__name__}._look_up" in description

    @sgl.function
    def program(s):
        s += sgl.tool("found", _look_up, LOUD, 2)

    with pytest.raises(ValueError, match="_Loud in a program has no form in JSON"):
        trace(program).as_dict()


def test_an_operation_has_a_name_of_the_list_and_no_other():
    assert function_named("json.dumps") is json.dumps
    for name in ("os.system", "builtins.eval", "json.load", "builtins.print", "nothing"):
        with pytest.raises(KeyError):
            function_named(name)
    with pytest.raises(TypeError, match="methods of plain data only"):
        function_named(".upper")(LOUD)


def test_a_value_may_depend_on_thousands_of_others():
    @sgl.function
    def program(s, n):
        total = n
        for _ in range(3000):
            total = total + 1
        s += str(total)

    graph = trace(program)
    (node,) = graph.nodes
    assert Arguments({"n": 1}).value(pieces(node)[0]) == "3001"
    assert len(graph.as_dict()["values"]) == 3002
