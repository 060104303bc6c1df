"""`sgl-vllm run` on the command line: which program, which arguments, and the output."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sgl_vllm as sgl
from sgl_vllm.commands import cli
from sgl_vllm.commands.run import MODULE_NAME, URL_VARIABLE
from tests.unit.lang.conftest import FakeServer, RunningServer

PROGRAMS = {
    "story": """
        from dataclasses import dataclass
        from neighbour import ENDING

        @dataclass
        class Animal:
            name: "str"

        @sgl.function
        def story(s, animal, mood="sad", n: int = 1):
            s += f"A {mood} story of {n} about a {animal}." + sgl.gen("text")
            s += ENDING + sgl.select("end", ["good", "bad"])
            s["animal"] = Animal(str(animal))
            return [n, {"animal": Animal("fox")}]

        if __name__ == "__main__":
            raise SystemExit("the main part ran")
    """,
    "one": """
        @sgl.function
        def one(s, animal):
            s += repr(animal)
    """,
    "two": """
        @sgl.function
        def one(s):
            s += "one"

        @sgl.function
        def two(s):
            s += "two"
    """,
    "importing": """
        from two import one, two

        @sgl.function
        def main(s):
            s += "main"
    """,
    "fussy": """
        @sgl.function
        def fussy(s, word):
            if word == "bad":
                raise ValueError("not this word")
            s["word"] = word
    """,
    "failing": """
        @sgl.function
        def failing(s):
            s += "before" + sgl.gen("x")
            s.sync()
            raise RuntimeError("enough")
    """,
    "branch": """
        @sgl.function
        def branch(s):
            s += "before"
            s.fork(2)[1].__iadd__(sgl.gen("x", dtype=int))
    """,
    "own": """
        sgl.set_default_backend(sgl.VLLM("URL"))

        @sgl.function
        def own(s):
            s += "x" + sgl.gen("y")
    """,
}
FILES = {
    "neighbour.py": "ENDING = ' The end is '",
    "empty.py": "",
    "list.json": "[]",
    "vars.json": '{"animal": "fox", "mood": "glad"}',
    "items.jsonl": '{"animal": "fox"}\n\n{"animal": "hare", "n": 2}\n',
    "words.jsonl": '{"word": "good"}\n{"word": "bad"}\n{"word": "fine"}\n',
    "bad.jsonl": '{"animal": "fox"}\n{"mood": "sad"}\n',
}
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    running = RunningServer()
    yield running
    running.stop()


@pytest.fixture
def server(running: RunningServer) -> FakeServer:
    running.renew()
    return running.fake


@pytest.fixture
def folder(tmp_path: Path, server: FakeServer) -> Path:
    for name, text in PROGRAMS.items():
        body = textwrap.dedent(text).replace("URL", server.url)
        (tmp_path / f"{name}.py").write_text(f"import sgl_vllm as sgl\n{body}")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def run(
    folder: Path,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """Runs the command in `folder` against the fake server. (exit status, output, errors)"""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(URL_VARIABLE, server.url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    # The client waits half a second before a retry.
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)

    def run(*arguments: str) -> Outcome:
        status = cli.main(["run", *arguments])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    yield run
    sys.modules.pop(MODULE_NAME, None)


def the_line(errors: str) -> str:
    """The only line on standard error."""
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("sgl-vllm run: ").rstrip()


# --- what it does --------------------------------------------------------------------------------


def test_a_program_runs_with_its_arguments_and_is_shown(run: Run) -> None:
    status, out, errors = run("story.py", "--var", "animal=hare", "--var", "n=3")
    assert (status, errors) == (0, "")
    assert "A sad story of 3 about a hare.[gen text]" in out.replace("[cached]", "").replace(
        "[/cached]", ""
    )
    assert "[select end]" in out


def test_the_text_is_printed_as_it_arrives(run: Run) -> None:
    status, out, errors = run("story.py", "--var", "animal=hare", "--stream")
    assert (status, errors) == (0, "")
    assert out.startswith("A sad story of 1 about a hare.[")
    assert "generated tokens" in out.splitlines()[-1]
    status, out, errors = run("failing.py", "--stream")
    assert (status, out.startswith("before[")) == (1, True)
    assert "RuntimeError: enough" in errors


def test_json_is_for_machines(run: Run) -> None:
    given = ("--vars", "vars.json", "--var", "animal=hare")
    status, out, _ = run("story.py", *given, "--json")
    assert status == 0
    shown = json.loads(out)
    assert shown["program"] == "story"
    assert shown["variables"]["end"] in ("good", "bad")
    assert shown["variables"]["animal"] == {"name": "hare"}
    assert shown["text"].startswith("A glad story of 1 about a hare.[")
    assert shown["messages"] == []
    assert shown["ret_value"] == [1, {"animal": {"name": "fox"}}]
    assert shown["usage"]["calls"] == 2
    assert "error" not in shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("animal=hare", "'hare'"),
        ("animal=3", "3"),
        ('animal="3"', "'3'"),
        ('animal=["a", 1]', "['a', 1]"),
        ("animal=a=b", "'a=b'"),
        ("animal=", "''"),
        ("animal=NaN", "'NaN'"),
    ],
)
def test_a_value_is_json_if_it_reads_as_json(run: Run, given: str, shown: str) -> None:
    _, out, _ = run("one.py", "--var", given, "--json")
    assert json.loads(out)["text"] == shown


def test_sampling_is_the_default_of_every_gen(run: Run, server: FakeServer) -> None:
    run("story.py", "--var", "animal=a", "--temperature", "0.25", "--max-new-tokens", "7")
    (body,) = [b for b in server.bodies("/v1/completions") if "prompt_logprobs" not in b]
    assert (body["temperature"], body["max_tokens"]) == (0.25, 7)


def test_a_batch_runs_once_per_line(run: Run) -> None:
    status, out, errors = run("story.py", "--batch", "items.jsonl", "--var", "mood=odd", "--json")
    assert status == 0
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert texts[0].startswith("A odd story of 1 about a fox.")
    assert texts[1].startswith("A odd story of 2 about a hare.")
    assert "2/2" in errors  # the progress bar


def test_a_failed_item_of_a_batch_is_reported_in_its_place(run: Run) -> None:
    status, out, errors = run("fussy.py", "--batch", "words.jsonl")
    assert status == 1
    assert out.splitlines() == [
        '1: {"word": "good"}',
        "2: ✗ the program raised ValueError: not this word (line 6)",
        '3: {"word": "fine"}',
    ]
    assert "1 of 3 runs failed" in errors


def test_a_recorded_run_is_played_back_without_a_server(run: Run, server: FakeServer) -> None:
    given = ("story.py", "--var", "animal=hare", "--json")
    _, first, _ = run(*given, "--record", "run.jsonl")
    num_requests = len(server.requests)
    status, again, _ = run(*given, "--replay", "run.jsonl")
    assert status == 0
    assert again == first
    assert len(server.requests) == num_requests
    status, _, errors = run("story.py", "--var", "animal=fox", "--replay", "run.jsonl")
    assert status == 1
    assert "the prompt at character" in the_line(errors)


def test_the_backend_that_the_file_sets_is_used_unless_an_url_is_given(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(URL_VARIABLE)
    assert run("own.py")[0] == 0
    status, _, errors = run("own.py", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "127.0.0.1:9" in errors


# --- which program -------------------------------------------------------------------------------


def test_imported_programs_do_not_stand_in_the_way(run: Run) -> None:
    _, out, _ = run("importing.py", "--json")
    assert json.loads(out)["text"] == "main"
    _, out, _ = run("importing.py", "--program", "two", "--json")
    assert json.loads(out)["text"] == "two"


# --- one line for each fault ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.py"], "no such file: none.py"),
        (
            ["story.py"],
            "story(s, animal, mood='sad', n: int = 1): missing a required argument: 'animal'. Set",
        ),
        (
            ["story.py", "--var", "animal=a", "--var", "colour=red"],
            "story(s, animal, mood='sad', n: int = 1): got an unexpected keyword argument 'colour'",
        ),
        (["two.py"], "two.py has several programs, choose one with --program: one, two"),
        (["two.py", "--program", "three"], "two.py has no program three; it has: one, two"),
        (
            ["story.py", "--batch", "bad.jsonl"],
            "story(s, animal, mood='sad', n: int = 1): missing a required argument: 'animal' (line",
        ),
        (["empty.py"], "empty.py has no program: decorate a function with @sgl.function"),
        (["story.py", "--var", "animal"], "--var needs NAME=VALUE, not 'animal'"),
        (["story.py", "--vars", "empty.py"], "empty.py is not valid JSON: Expecting value"),
        (["story.py", "--batch", "list.json", "--stream"], "--batch cannot be used with"),
        (["story.py", "--var", "animal=a", "--url", "here"], "base_url must start with http://"),
        (["story.py", "--var", "animal=a", "--replay", "list.json"], "list.json is not a record"),
        (["story.py", "--var", "animal=a", "--record", "no/where"], "no/where cannot be opened"),
        (["story.py", "--var", "animal=a", "--html", "no/where"], "no/where cannot be opened"),
        (
            ["story.py", "--var", "animal=a", "--temperature", "-1"],
            "temperature must be at least 0",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(
    run: Run, server: FakeServer, arguments: list[str], said: str
) -> None:
    status, _, errors = run(*arguments)
    assert status == 2
    assert the_line(errors).startswith(said)
    assert server.requests == []


MAIN_PART = '. Put the code that runs the program under `if __name__ == "__main__":`'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("undefined", f"NameError: name 'undefined' is not defined (line 2){MAIN_PART}"),
        ("raise SystemExit('no --animal')", f"SystemExit: no --animal (line 2){MAIN_PART}"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (line 2)"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_where(
    run: Run, folder: Path, line: str, said: str
) -> None:
    (folder / "broken.py").write_text(f"x = 1\n{line}\n")
    status, _, errors = run("broken.py")
    assert status == 1
    assert the_line(errors) == f"broken.py cannot be loaded: {said}"


def test_a_server_that_is_down_is_one_line_that_says_what_to_do(run: Run) -> None:
    status, out, errors = run("story.py", "--var", "animal=a", "--url", "http://127.0.0.1:9")
    assert status == 1
    line = the_line(errors)
    assert line.startswith(
        "gen 'text' failed: no answer from the vLLM server at http://127.0.0.1:9"
    )
    assert "vllm serve MODEL" in line
    assert "A sad story" in out  # what there is is shown


def test_a_failed_run_still_gives_its_json_and_page(run: Run, folder: Path) -> None:
    status, out, errors = run("failing.py", "--json", "--html", "page.html")
    assert status == 1
    assert the_line(errors) == "the program raised RuntimeError: enough (line 7)"
    shown = json.loads(out)
    assert shown["error"] == "the program raised RuntimeError: enough (line 7)"
    assert list(shown["variables"]) == ["x"]
    page = (folder / "page.html").read_text()
    assert "<title>failing of failing.py</title>" in page and "RuntimeError: enough" in page


def test_an_error_in_a_branch_that_is_never_read_fails_the_run(run: Run) -> None:
    status, _, errors = run("branch.py")
    assert status == 1
    assert the_line(errors).startswith("gen 'x' in fork[1] failed")
