"""`sgl-vllm` itself: its version, and what it says of words that it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgl_vllm.commands import cli
from sgl_vllm.version import __version__


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed to standard error about a wrong command line, as one line."""
    assert cli.main(arguments) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_version_is_an_option_too(capsys):
    assert cli.main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"sgl-vllm {__version__}, ")
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == shown


def test_its_help_imports_neither_the_language_nor_a_client():
    code = (
        "import sys; from sgl_vllm.commands import cli; cli.main(['--help']); print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    imported = answer.stdout.splitlines()[-1].split()
    assert "sgl_vllm.commands.cli" in imported
    assert not {"sgl_vllm.lang", "httpx", "openai", "vllm", "torch"} & {*imported}


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["docter", "MODEL"], "Did you mean 'doctor'?"),
        (["--versoin"], "--version"),
        (["quickstart", "--no-brwser"], "--no-browser"),
        (["demo", "--jsno"], "--json"),
        (["lint-prompts", "--tokeniser", "m", "log"], "--tokenizer"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_nearest(capsys, words, near):
    assert near in said(capsys, *words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["top", "http://"], "http:// is not a server's URL"),
        (["top", "host:port"], "host:port is not a server's URL"),
        (["tree", "ftp://host"], "ftp://host is not a server's URL"),
        (["why", "http://host"], "the arguments are [URL] REQUEST"),
        (["pin", "host", "a", "b"], "the arguments are [URL] TEXT"),
        (["lint-prompts", "no.jsonl"], "no.jsonl cannot be opened: No such file or directory"),
    ],
)
def test_a_wrong_address_or_file_is_said_in_a_sentence(capsys, words, complaint):
    error = said(capsys, *words)
    assert complaint in error and "Errno" not in error


@pytest.mark.parametrize(
    "words",
    [
        ["top", "--once", "--interval", "0.01"],
        ["tree"],
        ["why", "cmpl-1"],
        ["pin", "x"],
        ["unpin", "x"],
    ],
)
def test_without_a_url_commands_ask_the_same_server(capsys, monkeypatch, words):
    monkeypatch.setenv("SGL_VLLM_URL", "http://127.0.0.1:9")
    assert cli.main(words) == 1
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "http://127.0.0.1:9 does not answer: Connection refused." in printed
