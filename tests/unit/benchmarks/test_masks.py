"""`benchmarks.masks`: verdicts and times over a small backend, where a character is a token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")  # its interface's names are used

import numpy as np

from benchmarks import masks
from benchmarks.mask_verdicts import Asker, Case, Walk


@pytest.fixture(autouse=True)
def _loggers_and_environment_as_before(monkeypatch):
    """The command quiets vLLM's log for its process; other tests read it."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


END = 0
WORDS = 4


class Bitmask:
    """What of a tensor is used."""

    def __init__(self) -> None:
        self.array = np.zeros((1, WORDS), dtype=np.int32)

    def numpy(self) -> np.ndarray:
        return self.array


@dataclass
class Grammar:
    """Of a schema that is `"a|bc"`: allows these texts."""

    texts: tuple[str, ...]
    read: str = ""
    ended: bool = False

    def allowed(self) -> set[int]:
        after = {text[len(self.read) :] for text in self.texts if text.startswith(self.read)}
        return {ord(rest[0]) if rest else END for rest in after}

    def fill_bitmask(self, bitmask: Bitmask, index: int) -> None:
        bitmask.array[index] = 0
        row = bitmask.array[index].view(np.uint32)
        for token in self.allowed():
            row[token >> 5] |= np.uint32(1 << (token & 31))

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        (token,) = tokens
        if token not in self.allowed():
            return False
        self.ended = token == END
        self.read += chr(token) if token else ""
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens if tokens[0] in self.allowed() else []

    def is_terminated(self) -> bool:
        return self.ended


class Backend:
    def compile_grammar(self, kind: Any, schema: str) -> Grammar:
        return Grammar(tuple(json.loads(schema).split("|")))

    def allocate_token_bitmask(self, num_rows: int) -> Bitmask:
        assert num_rows == 1
        return Bitmask()


def verdict_of(schema: str, *, valid: tuple[str, ...] = (), invalid: tuple[str, ...] = ()) -> Any:
    instances = [*((text, True) for text in valid), *((text, False) for text in invalid)]
    walks = tuple(Walk(tuple(map(ord, text)), is_valid) for text, is_valid in instances)
    return Asker(Backend(), END, 20.0).ask(Case("case", schema, walks))


def test_a_schema_is_right_when_the_valid_come_through_and_the_invalid_do_not() -> None:
    verdict = verdict_of('"ab|abc"', valid=("ab", "abc"), invalid=("a", "abcd", "b", ""))
    assert verdict.right
    assert verdict.kind == "right"
    assert (verdict.num_valid, verdict.num_invalid, verdict.disagreements) == (2, 4, 0)


# -- the command


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        eos_token_id = END

        def __len__(self) -> int:
            return 128

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(letter) % 128 for letter in text]

    class Permissive(Backend):
        def compile_grammar(self, kind: Any, schema: str) -> Grammar:
            return Grammar(("true",))

    def made(*arguments: Any, **named: Any) -> Backend:
        return Permissive()

    def class_of(name: str) -> Callable[..., Any] | str:
        return "not written yet" if name == "sgl" else made

    monkeypatch.setattr(masks, "tokenizer_of", lambda folder: Tokenizer())
    monkeypatch.setattr(masks, "backend_class", class_of)


def test_the_command_measures_what_there_is_and_writes_all_of_it(
    fake_backends: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "masks.json"
    sizes = ["--every", "2", "--limit", "5", "--outlines-limit", "2"]
    assert masks.main([*sizes, "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert "without sgl: not written yet" in captured.err
    assert "mask, p50" in captured.out
    content = json.loads(file.read_text())
    assert content["backends"].keys() == {"xgrammar", "guidance", "outlines"}
    assert content["backends"]["outlines"]["schemas"]["tried"] == 2
    xgrammar = content["backends"]["xgrammar"]
    assert xgrammar["schemas"] == {
        **dict.fromkeys(("refused", "gave_up", "failed", "invalid_accepted", "by_automata"), 0),
        "tried": 5,
        "right": 0,
        "valid_refused": 5,
    }
    assert xgrammar["compile_us"]["count"] == 5  # the set-up is not among them
    assert xgrammar["verdicts"][1]["name"] == "generated_2"
    assert xgrammar["verdicts"][1]["kind"] == "valid refused"
    assert content["versions"]["vllm"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--backends", "xgrammar,regex"], "there is no backend 'regex'"),
        (["--data", "/nowhere"], "cannot read /nowhere/maskbench_dev.jsonl.gz"),
        (["--json", "/nowhere/masks.json"], "there is no folder /nowhere"),
        (["--every", "0"], "less than 1"),
        (["--tokenizer", "/nowhere"], "no tokenizer of /nowhere"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        masks.main(words)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err
