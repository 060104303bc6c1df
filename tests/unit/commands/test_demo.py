"""`sgl-vllm demo`: what it prints, from made-up results."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from sgl_vllm.commands import demo
from sgl_vllm.commands.demo import Arm, Comparison
from sgl_vllm.demo.program import Guide
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


def test_a_different_answer_is_shown_with_both_texts() -> None:
    different = comparison(replace(GUIDE, continent="Africa"))
    assert not different.same_answers
    text = shown(different)
    assert "same answers: NO" in text
    assert "South Korea, continent:\n  stock  Asia\n  plugin Africa" in text
    assert "card:" not in text
