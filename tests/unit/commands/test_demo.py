"""`sgl-vllm demo`: what it prints, from made-up results."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sgl_vllm.commands import cli, demo
from sgl_vllm.commands.demo import Arm, Comparison
from sgl_vllm.demo.program import CARD, Guide
from sgl_vllm.server_process import Counters

CARD_OF_KOREA = {
    "name": "South Korea",
    "capital": "Seoul",
    "continent": "Asia",
    "language": "Korean",
    "currency": "won",
    "river": "Han",
    "dish": "bibimbap",
}
GUIDE = Guide(
    "South Korea",
    "The capital of South Korea is Seoul.",
    "People in South Korea eat kimchi.",
    ("Try kimchi.", "See the old museum.", "Take a light jacket."),
    "Try kimchi. See the old museum.",
    json.dumps(CARD_OF_KOREA),
    "Asia",
)
TREE = {"block_size": 128, "nodes": [{"parent": None, "namespace": 0, "num_tokens": 5, "hits": 2}]}


def comparison(plugin_guide: Guide = GUIDE) -> Comparison:
    messages = ({"role": "user", "content": "Is [this] safe?"},)
    stock = Arm((GUIDE, GUIDE), messages, Counters(200, 1000, 100, 300, 0, 0), 9.0)
    plugin = Arm((GUIDE, plugin_guide), messages, Counters(120, 1000, 800, 300, 70, 0), 4.0)
    return Comparison(stock, plugin, TREE)


def shown(result: Comparison) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    demo.show(result, console)
    return console.export_text()


def test_the_card_is_the_json_that_json_dumps_writes() -> None:
    assert re.fullmatch(CARD, GUIDE.card)
    assert not re.fullmatch(CARD, GUIDE.card.replace("Asia", "Atlantis"))


def test_equal_answers_are_reported_with_the_counts() -> None:
    assert comparison().same_answers
    text = shown(comparison())
    assert "same answers: yes" in text
    assert re.search(r"prompt tokens computed +900 +200\n", text)
    assert re.search(r"forward passes +200 +120\n", text)
    assert "blocks of 128 tokens" in text
    assert "Is [this] safe?" in text  # not markup
    assert "5 tokens  ×2" in text


def test_a_different_answer_is_shown_with_both_texts() -> None:
    different = comparison(replace(GUIDE, continent="Africa"))
    assert not different.same_answers
    text = shown(different)
    assert "same answers: NO" in text
    assert "South Korea, continent:\n  stock  Asia\n  plugin Africa" in text
    assert "card:" not in text


def test_the_json_result_has_the_counts_and_the_answers() -> None:
    content = json.loads(comparison().to_json())
    assert content["same_answers"] is True
    assert content["arms"]["plugin"]["forced_tokens"] == 70
    assert content["arms"]["stock"]["computed_prompt_tokens"] == 900
    assert content["arms"]["plugin"]["guides"][0]["continent"] == "Asia"
    assert content["tree"] == TREE


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--model", str(tmp_path)]) == 1
    assert "has no config.json" in " ".join(capsys.readouterr().err.split())
