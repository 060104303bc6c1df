"""Views of a program's state while it runs: what there is so far, and views that follow the run."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from rich.console import Console

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import branch_name
from sgl_vllm.lang.transcript import Timing
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.views import live as view_live
from sgl_vllm.lang.views.html import MAX_BARS, duration, fragment_of
from sgl_vllm.lang.views.picture import DrawnBranch, DrawnFork, DrawnTurn, Picture, Piece
from tests.unit.lang.parsed_html import Parsed, slices
from tests.unit.lang.scripted import ScriptedBackend
from tests.unit.lang.test_view import printed, ran, two_endings, weather, writing


def test_a_running_program_is_shown_with_what_has_come() -> None:
    halfway, on = threading.Event(), threading.Event()

    class Halting(ScriptedBackend):
        async def generate(self, request):
            request.watch("half", 1)
            halfway.set()
            while not on.is_set():
                await asyncio.sleep(0.002)
            return await super().generate(request)

    state = ran(
        writing(sgl.user("Question?") + sgl.assistant(sgl.gen("answer"))),
        Halting(lambda _: " done"),
        stream=True,
    )
    assert halfway.wait(10)
    try:
        fragment = state._repr_html_()
        parsed = Parsed(fragment)
        assert "running for " in parsed.texts("sgl-heading")[0]
        assert "running: gen 'answer'" in parsed.texts("sgl-view")[0]
        assert slices(fragment, "sgl-gen-kind") == ["half"]
        assert parsed.texts("sgl-name") == ["answer …"]
        assert "[gen answer …]half" in printed(state)
        ElementTree.fromstring(sgl.fork_tree_svg(state))
    finally:
        on.set()
    state.sync()
    assert "half" not in slices(state._repr_html_(), "sgl-gen-kind")
    assert "done in " in Parsed(state._repr_html_()).texts("sgl-heading")[0]
    ended_s = [state._picture().elapsed_s, state._picture().elapsed_s]
    assert ended_s[0] == ended_s[1], "the time goes on after the end"


def test_timings_are_the_longest_in_their_order_each_of_them_once() -> None:
    def times_of(picture: Picture) -> list[str]:
        return Parsed(fragment_of(picture)).texts("sgl-timed")

    pieces = tuple(
        Piece("gen", (), f"g{n}", timing=Timing(n, n + 1 + n % 7)) for n in range(MAX_BARS + 6)
    )
    many = Picture(DrawnBranch("", "done", (DrawnTurn(None, pieces),), 0), Usage(), elapsed_s=80)
    shortest = [n for n in range(MAX_BARS + 6) if n % 7 == 0][-6:]
    assert times_of(many) == [f"g{n}" for n in range(MAX_BARS + 6) if n not in shortest]
    assert "and 6 shorter ones" in fragment_of(many) and "done in 80.0 s" in fragment_of(many)

    root = ran(two_endings)._picture().root
    (fork,) = root.forks  # the prompt may go on as one of its branches
    continued = DrawnTurn(None, tuple(fork.branches[1].pieces))
    picture = Picture(replace(root, blocks=(*root.blocks, continued)), Usage())
    assert sorted(times_of(picture)) == ["ending fork[0]", "ending fork[1]", "last", "story"]
    assert not Parsed(ran(writing("constant"))._repr_html_()).of_class("sgl-timings")
    durations = [duration(seconds) for seconds in (0.0004, 0.45, 2.314, 75.25, 744)]
    assert durations == ["0 ms", "450 ms", "2.31 s", "75.2 s", "12.4 min"]


def test_every_moment_of_a_run_can_be_drawn() -> None:
    async def shortly(request) -> None:
        await asyncio.sleep(0.05)

    def busy(s):
        for number in range(12):
            s += f" {number}" + sgl.gen(f"x{number}")
            forks = s.fork(3)
            forks += sgl.gen("a") + sgl.tool(f"t{number}", weather) + sgl.select("b", ["c", "d"])
            forks[0].fork(2).__iadd__(sgl.gen("e"))
            if number % 3 == 0:
                forks.first(lambda branch: True)
            forks.join("gather_variable" if number % 2 else "concate_and_append")

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        state = ran(busy, ScriptedBackend(before=shortly), stream=True)
        lengths = []
        while not view_live._has_ended(state._stream):
            picture = state._picture()
            lengths.append(sum(b.num_chars for b in picture.all_branches if b.label == ""))
            if len(lengths) % 10 == 1:
                Parsed(state._repr_html_())
                ElementTree.fromstring(sgl.fork_tree_svg(state))
                printed(state)
        state.sync()
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set(lengths)) > 10
    assert lengths == sorted(lengths)
    root = state._picture().root
    assert sum(isinstance(block, DrawnFork) for block in root.blocks) == 12
    assert "".join(piece.text for piece in root.pieces) == state.text()


# --- live ----------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


def is_generating(picture: Picture, label: str) -> bool:
    return any(
        branch.label == label and branch.status == "running" and "gen" in (branch.busy or "")
        for branch in picture.all_branches
    )


def test_following_draws_all_branches_and_ends_with_the_end() -> None:
    drawn: list[Picture] = []

    async def once_drawn(request) -> None:
        label = branch_name.get()
        await until(lambda: any(is_generating(picture, label) for picture in list(drawn)))

    state = ran(two_endings, ScriptedBackend(before=once_drawn), stream=True)
    view_live.follow(state._stream, drawn.append)
    last = drawn[-1]
    assert last == state._picture()
    assert [branch.label for branch in last.all_branches] == ["", "fork[0]", "fork[1]"]
    assert last.root.status == "done"
    for label in ("", "fork[0]", "fork[1]"):
        assert any(is_generating(picture, label) for picture in drawn[:-1])


def test_following_draws_at_most_eight_times_a_second_and_only_what_is_new() -> None:
    drawn: list[tuple[float, Picture]] = []

    class Chatty(ScriptedBackend):
        async def generate(self, request):
            for number in range(150):
                request.watch("x", None)
                await asyncio.sleep(0.002 if number < 149 else 0.8)
            return await super().generate(request)

    @sgl.function
    def forked(s):
        forks = s.fork(1)
        forks += "?" + sgl.gen("answer")
        forks.join()

    state = forked.run(backend=Chatty(), stream=True)
    view_live.follow(state._stream, lambda picture: drawn.append((time.monotonic(), picture)))
    times_s = [time_s for time_s, _ in drawn]
    assert all(later - sooner > 0.12 for sooner, later in pairwise(times_s))
    lengths = [sum(b.num_chars for b in picture.all_branches) for _, picture in drawn]
    assert 1 <= lengths.count(1 + 150) <= 3  # no more in the time without news
    assert all(
        not stream.listeners._listeners for stream in [state._stream, *state._stream.children]
    )


def test_following_a_failed_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    @sgl.function
    def failing(s):
        s += "?" + sgl.gen("number", dtype=int)
        raise RuntimeError("never mind")

    state = failing.run(backend=ScriptedBackend(lambda _: "word"), stream=True)
    sgl.live(state)
    assert "RuntimeError: never mind" in capsys.readouterr().out


@pytest.fixture
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich redraws nothing in a dumb terminal, such as a CI job may have."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("capable_terminal")
def test_live_shows_the_last_lines_of_what_is_longer_than_the_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=10)
    while_running = ""

    async def once_drawn(request) -> None:
        nonlocal while_running
        await until(lambda: "line 99" in output.getvalue())
        while_running = output.getvalue()

    @sgl.function
    def long(s):
        s += "".join(f"line {number}\n" for number in range(100))
        s += sgl.gen("x")

    backend = ScriptedBackend(before=once_drawn, cached_share=0)
    state = long.run(backend=backend, stream=True)
    sgl.live(state, console)
    assert "line 99" in while_running and "running" in while_running
    assert "line 5\n" not in while_running
    at_the_end = output.getvalue()[len(while_running) :]
    assert "line 5\n" in at_the_end and "line 99" in at_the_end
    assert "\x1b[2K" in output.getvalue()  # lines are overwritten


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a kernel's display would show: (how, HTML)."""
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, drawn: str) -> None:
            shown.append(("update", drawn))

    def display(drawn: str, display_id: bool) -> Handle:
        shown.append(("display", drawn))
        return Handle()

    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    displays = types.ModuleType("IPython.display")
    displays.HTML, displays.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return shown


def test_live_in_a_notebook_updates_one_output(notebook: list[tuple[str, str]]) -> None:
    state = ran(two_endings, stream=True)
    sgl.live(state)
    assert [how for how, _ in notebook] == ["display"] + ["update"] * (len(notebook) - 1)
    assert notebook[-1][1] == state._repr_html_()


def test_live_on_the_languages_own_loop_is_refused() -> None:
    @sgl.function
    async def inside(s):
        s += "x"
        sgl.live(s)

    with pytest.raises(RuntimeError, match="event loop"):
        inside.run(backend=ScriptedBackend())
