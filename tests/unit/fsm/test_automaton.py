"""States, what may come next in them, and what must."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm import automaton as automaton_module
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.json_string import COUNTED_STRING, STRING, JsonString
from sgl_vllm.fsm.regex import full_match
from sgl_vllm.fsm.schema import compile_schema
from tests.effort import examples
from tests.unit.fsm.grammars import GRAMMARS
from tests.unit.fsm.texts import accepts, after, random_walk

literals = st.sampled_from([b"a", b"ab", b"ba", b"abc", "é".encode(), "è".encode(), b'"'])


@st.composite
def choices(draw, inner):
    """Literals, each with what follows it."""
    texts = draw(st.lists(literals, min_size=1, max_size=4))
    return Literals(tuple((text, draw(st.none() | inner)) for text in texts))


expressions = st.recursive(
    st.one_of(
        literals.map(literal),
        st.just(EMPTY),
        st.sampled_from(["a*b", "(?:ab|b)?", "[ab]{2}"]).map(lambda p: full_match(p).expression),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Seq(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(Alt),
        inner.map(lambda expression: Lazy(lambda: expression)),
        choices(inner),
    ),
    max_leaves=8,
)


def texts_of(expression, longest: int) -> set[bytes]:
    """The texts of an expression that recurs nowhere, by definition."""
    if isinstance(expression, Lazy):
        return texts_of(expression.get(), longest)
    if isinstance(expression, Alt):
        return set().union(*[texts_of(option, longest) for option in expression.options])
    if isinstance(expression, Seq):
        texts = {b""}
        for part in expression.parts:
            ends = texts_of(part, longest)
            texts = {a + b for a in texts for b in ends if len(a) + len(b) <= longest}
        return texts
    if isinstance(expression, Literals):
        return {
            text + rest
            for text, then in zip(expression.texts, expression.followings, strict=True)
            for rest in texts_of(then, longest)
            if len(text) + len(rest) <= longest
        }
    found, frontier = set(), {b""}
    for _ in range(longest):
        frontier = {w + bytes([b]) for w in frontier for b in b"ab"}
        frontier = {w for w in frontier if walk_dfa(expression, w) >= 0}
        found |= {w for w in frontier if expression.dfa.accepting[walk_dfa(expression, w)]}
    return found


def walk_dfa(terminal, word: bytes) -> int:
    state = terminal.index
    for byte in word:
        if state >= 0:
            state = int(terminal.dfa.row(state)[byte])
    return state


def texts_from(state, longest: int) -> set[bytes]:
    found = {b""} if state.accepting else set()
    if longest:
        for byte in range(256):
            following = state.step(byte)
            if following is not None:
                found |= {bytes([byte]) + rest for rest in texts_from(following, longest - 1)}
    return found


@settings(max_examples=examples(30), deadline=None)
@given(expressions)
def test_an_automaton_has_the_texts_of_its_expression(expression):
    assert texts_from(Automaton(expression).start, 4) == texts_of(expression, 4)


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_bytes_that_may_come_are_those_that_step(name):
    rng = random.Random(5)
    for state in random_walk(Automaton(GRAMMARS[name]()).start, rng, 40, end=0.1):
        for byte in range(256):
            assert bool(state.first >> byte & 1) == (state.step(byte) is not None)


def forced_by_bytes(state):
    run = bytearray()
    while not state.accepting:
        options = [byte for byte in range(256) if state.step(byte) is not None]
        if len(options) != 1:
            break
        run += bytes(options)
        state = state.step(options[0])
    return bytes(run), state


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_forced_run_is_the_longest_with_one_way_on(name):
    rng = random.Random(6)
    for state in random_walk(Automaton(GRAMMARS[name]()).start, rng, 30, end=0.1):
        assert state.forced() == forced_by_bytes(state)
        assert state.forced()[1] is state.forced()[1]


def test_an_expression_within_itself_nests():
    inner: list = []
    inner.append(Alt((EMPTY, Seq(literal(b"("), Lazy(lambda: inner[0]), literal(b")")))))
    grammar = Automaton(inner[0])
    assert accepts(grammar, "((()))") and accepts(grammar, "") and not accepts(grammar, "(()")


def test_an_expression_that_begins_with_itself_ends():
    inner: list = []
    inner.append(Alt((Lazy(lambda: inner[0]), literal(b"a"))))
    assert accepts(inner[0], "a") and not accepts(inner[0], "aa")


def test_too_many_ways_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(automaton_module, "MAX_THREADS", 30)
    options = [full_match(f"a{{{n}}}b").expression for n in range(1, 50)]
    with pytest.raises(TooComplexError):
        Automaton(Alt(options))


@settings(max_examples=examples(30), deadline=None)
@given(st.text('aé😀"\\\n\x1f', max_size=6), st.integers(0, 4), st.none() | st.integers(0, 4))
def test_strings_are_counted_by_characters(text, low, high):
    within = low <= len(text) and (high is None or len(text) <= high)
    if high is None or low <= high:
        grammar = Automaton(JsonString.of(COUNTED_STRING, 0, low, high))
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)[1:]) == within
        # A character may be two escapes: of a surrogate pair.
        assert accepts(grammar, json.dumps(text)[1:]) == within


@pytest.mark.parametrize(
    "data",
    [b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80",
     b"\x80", b"\xff", b"\n", b"\x00", b"\\x", b"\\u12g4"],
)  # fmt: skip
def test_what_is_no_json_string_is_refused(data):
    assert after(Automaton(JsonString.of(STRING)).start, data) is None


def test_an_automaton_of_too_many_bytes_begins_anew(monkeypatch) -> None:
    monkeypatch.setattr(automaton_module, "MAX_BYTES", 20_000)
    automaton = Automaton(
        compile_schema({"anyOf": [{"type": "string", "maxLength": n} for n in range(40, 60)]})
    )
    before = automaton.start
    state = after(before, '"' + 39 * "a")
    assert state is not None and automaton.num_states < 5
    assert automaton.num_bytes < 40_000
    assert after(state, '"').accepting
    assert accepts(automaton, '"abc"') and not accepts(automaton, '"' + 60 * "a" + '"')
    assert after(before, '"abc"').accepting  # a state from before is as good as ever


def test_new_states_cost_of_the_allowance_and_known_ones_nothing() -> None:
    automaton = Automaton(
        compile_schema({"anyOf": [{"type": "string", "maxLength": n} for n in range(40, 60)]})
    )
    automaton.allowance = 50
    state = after(automaton.start, '"a')
    assert state is not None and automaton.allowance < 50
    with pytest.raises(TooComplexError, match="so many alternatives at once"):
        after(state, "abc")
    automaton.allowance = 0
    assert after(automaton.start, '"a') is state


def test_runs_are_remembered_within_bounds_and_forgotten_with_their_automaton() -> None:
    automaton = Automaton(compile_schema({"type": "string"}))
    start, before = automaton.start, automaton.num_bytes
    for token in range(100):
        start.remember((token,) * 50, (start,) * 50)
    assert start.known_run((99,) * 50) == (start,) * 50 and start.known_run((0,) * 50) is None
    assert automaton.num_bytes > before + 100 * 50 * 8, "counted, so that it starts over in time"
    automaton.clear()
    assert start.known_run((99,) * 50) is None


@pytest.mark.parametrize("attempt", range(5))
def test_threads_may_walk_one_automaton_at_a_time(attempt: int) -> None:
    listed = {str(number) for number in range(1_000, 9_000, 7)}
    start = Automaton(Literals([(text.encode(), None) for text in sorted(listed)])).start
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        texts = [*map(str, range(1_000, 9_000))]
        with ThreadPoolExecutor(4) as threads:
            ends = threads.map(lambda text: after(start, text), texts)
            found = {text for text, end in zip(texts, ends, strict=True) if end is not None}
    finally:
        sys.setswitchinterval(interval)
    assert found == listed
