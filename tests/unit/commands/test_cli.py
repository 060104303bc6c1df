"""`sgl-vllm` itself: its version, and what it says of words that it does not know."""

from __future__ import annotations

import pytest
from rich.table import Table

from sgl_vllm.commands import cli, top
from sgl_vllm.commands.top import draw
from sgl_vllm.version import __version__


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed to standard error about a wrong command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_version_is_an_option_too(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith(f"sgl-vllm {__version__}, ")
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == shown


def test_alone_it_prints_its_help(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert alone == capsys.readouterr() and alone.out.startswith("usage: sgl-vllm ")


@pytest.mark.parametrize(("word", "near"), [("docter", "doctor"), ("QUIKSTART", "quickstart")])
def test_a_misspelled_command_is_answered_with_the_nearest(capsys, word, near):
    error = refused(capsys, word, "MODEL")
    assert error.endswith(f"sgl-vllm: error: unknown command {word}; did you mean {near}?\n")


def test_another_unknown_command_is_answered_with_all_of_them(capsys):
    far = refused(capsys, "xyz")
    assert "unknown command xyz; the commands are doctor, verify, " in far


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--versoin"], "--version"),
        (["quickstart", "--no-brwser"], "--no-browser"),
        (["demo", "--modle=x"], "--model"),
        (["lint-prompts", "--tokeniser", "m", "log"], "--tokenizer"),
    ],
)
def test_a_misspelled_flag_is_answered_with_the_nearest(capsys, words, near):
    assert refused(capsys, *words).endswith(f"; did you mean {near}?\n")


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--nope"],
        ["doctor", "--nope"],
        ["version", "--nope"],
        ["tree", "http://a", "--nope"],
        ["verify", "--nope", "MODEL"],
    ],
)
def test_an_unknown_option_is_answered_with_the_usage_of_its_command(capsys, words):
    error = refused(capsys, *words)
    assert error.startswith(f"usage: sgl-vllm {words[0]} ")
    assert "--nope" in error


def test_the_help_names_both_options_of_the_server(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert "--plugin sgl_vllm" in shown and "--help=plugin-config" in shown


def test_every_column_of_top_is_in_its_help():
    table = draw([]).renderables[0]
    assert isinstance(table, Table)
    headers = [str(column.header).replace("\n/s", "/s") for column in table.columns]
    assert len(headers) == 12
    for header in headers[1:]:
        assert header.replace("\n", " ") in top.DESCRIPTION


@pytest.mark.parametrize("command", ["top", "tree"])
def test_the_help_explains_the_states_of_programs_that_the_server_infers(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for state in ("waiting for a person", "unknown"):
        assert f'"{state}" if' in shown
