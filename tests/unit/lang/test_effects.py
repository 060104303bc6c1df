"""Compiled programs call tools where the plain ones do: neither earlier, nor after a failure."""

from __future__ import annotations

import asyncio
import random
import time
import zlib

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from tests.effort import examples
from tests.unit.lang.random_programs import Log, program_of, sources
from tests.unit.lang.scripted import Meeting, ScriptedBackend, text_of
from tests.unit.lang.test_compile import compiled_unless_it_fails, facts_or_error

pytestmark = pytest.mark.timeout(60)


class Account:
    """A tool that changes something, and one that reads it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.paid: list[str] = []

    def pay(self, what: str = "rent") -> str:
        self.asked.append(what)
        time.sleep(0.05)  # so that what does not wait for it comes before
        self.paid.append(what)
        return f"paid {what}"

    def statement(self, *words: str) -> str:
        return f"{' '.join(words)}: {','.join(self.paid)}"


account = Account()


@pytest.fixture(autouse=True)
def _empty() -> None:
    account.asked.clear()
    account.paid.clear()


async def slowly(request):
    await asyncio.sleep(0.05)


async def fails_slowly(request):
    if "approve?" in text_of(request.prompt):
        await slowly(request)
        raise sgl.BackendError("down")


def ok_backend(**options):
    return ScriptedBackend(reply=lambda _: "ok", **options)


def both(program, **arguments):
    """The program, plain and compiled, with its arguments given."""
    return program.bind(**arguments), program.compile().bind(**arguments)


# --- what fails before a tool keeps it from being called -----------------------------------------


@sgl.function
def pays_if_approved(s):
    check = s.fork(1)[0]
    check += "approve?" + sgl.gen("ok")
    s["approval"] = check["ok"]
    s += sgl.tool("p", account.pay)


@sgl.function
def pays_after_a_sync(s):
    check = s.fork(1)[0]
    check += "approve?" + sgl.gen("ok")
    check.sync()
    s += sgl.tool("p", account.pay)


PAYMENT = sgl.tool("p", account.pay)


@sgl.function
def pays_by_an_argument(s, payment=PAYMENT):
    check = s.fork(1)[0]
    check += "approve?" + sgl.gen("ok")
    s["approval"] = check["ok"]
    s += payment


@pytest.mark.parametrize("program", [pays_if_approved, pays_after_a_sync, pays_by_an_argument])
def test_no_tool_is_called_after_a_failed_generation_that_the_function_reads(program):
    for runnable in both(program):
        with pytest.raises(sgl.ProgramError, match=r"gen 'ok' in fork\[0\] failed: down"):
            runnable.run(backend=ok_backend(before=fails_slowly))
    assert account.asked == []


@sgl.function
def converts_a_variable(s, n):
    one, two = s.fork(2)
    one += "Q" + sgl.gen("x")
    s["n"] = one["x"][9]
    two += sgl.tool("p", account.pay)


@sgl.function
def converts_for_nothing(s, n):
    s += "Q" + sgl.gen("x")
    s["x"][9]
    s += sgl.tool("p", account.pay)


@pytest.mark.parametrize(
    ("program", "error"), [(converts_a_variable, IndexError), (converts_for_nothing, IndexError)]
)
def test_no_tool_is_called_after_a_value_that_cannot_be_computed(program, error):
    for runnable in both(program, n=3):
        with pytest.raises(error):
            runnable.run(backend=ok_backend(before=slowly))
    assert account.asked == []


# --- the order of tools --------------------------------------------------------------------------


@sgl.function
def waits_by_a_sync(s, tool):
    one, two = s.fork(2)
    one += sgl.tool("w", account.pay)
    one.sync()
    two += tool
    return two["r"]


@sgl.function
def waits_by_a_join(s, tool):
    two = s.fork(1)[0]
    forks = s.fork(2)
    forks += sgl.tool("w", account.pay) + sgl.gen("x")
    forks.join()
    s["first"] = s["x"][0]
    two += tool
    return two["r"]


@pytest.mark.parametrize("kind", [sgl.tool, sgl.read_only_tool])
@pytest.mark.parametrize("program", [waits_by_a_sync, waits_by_a_join])
def test_a_tool_sees_the_effects_that_the_function_has_waited_for(program, kind):
    tool = kind("r", account.statement)
    for runnable in (program.bind(tool=tool), program.compile(tool=tool)):
        account.paid.clear()
        assert runnable.run(backend=ok_backend()).ret_value.startswith(": rent")


@pytest.mark.parametrize("kind", ["gen", "read_only_tool", "read_only_tool after text"])
def test_what_has_no_effect_does_not_wait_for_what_the_function_reads(kind):
    meeting = Meeting()

    @sgl.function
    def program(s):
        one, two = s.fork(2)
        one += "1" + sgl.gen("x")
        s["seen"] = one["x"].upper()
        if kind == "gen":
            two += "2" + sgl.gen("y")
        else:
            two += "found " + one["x"] if "after" in kind else ""
            two += sgl.read_only_tool("y", meeting.wait)
        return s["seen"] + two["y"]

    state = program.compile().run(backend=ok_backend(before=meeting.wait_async))
    assert state.ret_value == ("OKok" if kind == "gen" else "OKmet")


# --- random programs -----------------------------------------------------------------------------


def shuffling(seed: int) -> ScriptedBackend:
    """Generations that take different times, and give what their prompt determines."""

    async def before(request):
        delay = random.Random(f"{seed}{text_of(request.prompt)}").choice([0, 0, 0.001, 0.004])
        await asyncio.sleep(delay)

    def reply(prompt):
        return f"<{zlib.crc32(prompt.encode()) % 1000}>"

    return ScriptedBackend(reply=reply, before=before)


@pytest.mark.timeout(600)
@given(sources(), st.text("abct", max_size=5), st.integers(1, 9), st.integers(0, 99))
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_programs_compiled_give_the_same_and_call_tools_in_an_order_that_is_allowed(
    monkeypatch, source, a, k, seed
):
    # Otherwise a call more is counted where a tool takes long on a busy machine.
    monkeypatch.setattr(sgl.global_config, "enable_prefill_during_tools", False)
    note(source.text)
    plain, compiled = Log(), Log()
    asking = program_of(source.text, plain, notes_asked=True)
    expected = facts_or_error(lambda: asking.run(a=a, k=k, backend=shuffling(seed)))
    known = compiled_unless_it_fails(program_of(source.text), expected, a=a, k=k)
    if known is not None:
        assert facts_or_error(lambda: known.run(backend=shuffling(seed))) == expected
    ordinary = program_of(source.text.replace("read_only_tool", "tool"))
    assert facts_or_error(lambda: ordinary.run(a=a, k=k, backend=shuffling(seed))) == expected
    program = compiled_unless_it_fails(program_of(source.text, compiled), expected)
    if program is None:
        return
    assert facts_or_error(lambda: program.run(a=a, k=k, backend=shuffling(seed))) == expected
    assert list(plain.too_early(source)) == list(compiled.too_early(source)) == []
    if isinstance(expected, str):
        called = {call for call, _ in compiled.began if call.place in source.has_effect}
        assert called <= set(plain.asked)
    else:
        assert sorted(map(str, compiled.began)) == sorted(map(str, plain.began))
