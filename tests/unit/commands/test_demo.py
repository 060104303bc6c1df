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
from sgl_vllm.commands.demo import Arm, CacheNode, CacheTree, Comparison
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
LEAF = CacheNode(5, 0, ())


def comparison(plugin_guide: Guide = GUIDE) -> Comparison:
    messages = ({"role": "user", "content": "Is [this] safe?"},)
    stock = Arm((GUIDE, GUIDE), messages, Counters(200, 1000, 100, 300, 0, 0), 9.0)
    plugin = Arm((GUIDE, plugin_guide), messages, Counters(120, 1000, 800, 300, 70, 0), 4.0)
    return Comparison(stock, plugin, CacheTree(128, CacheNode(0, 3, (LEAF,))))


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


def test_a_different_answer_is_shown_with_both_texts() -> None:
    different = comparison(replace(GUIDE, continent="Africa"))
    assert not different.same_answers
    text = shown(different)
    assert "same answers: NO" in text
    assert "South Korea, continent:\n  stock  Asia\n  plugin Africa" in text
    assert "card:" not in text


def test_the_drawn_tree_counts_the_branches_that_it_leaves_out() -> None:
    large, small = CacheNode(50, 2, (LEAF,)), CacheNode(1, 0, ())
    root = CacheNode(0, 0, (small,) * 4 + (large,) * demo.MAX_TREE_CHILDREN)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.draw_tree(root))
    lines = console.export_text().splitlines()
    assert lines[0] == "root"
    assert lines[1].endswith("50 tokens, 2 hits")
    assert lines[-1].endswith("and 4 more, 4 tokens")


def test_the_json_result_has_the_counts_and_the_answers() -> None:
    content = json.loads(comparison().to_json())
    assert content["same_answers"] is True
    assert content["arms"]["plugin"]["forced_tokens"] == 70
    assert content["arms"]["stock"]["computed_prompt_tokens"] == 900
    assert content["arms"]["plugin"]["guides"][0]["continent"] == "Asia"
    assert content["tree"]["root"]["children"][0]["num_tokens"] == 5


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--model", str(tmp_path)]) == 1
    assert "has no config.json" in " ".join(capsys.readouterr().err.split())


def test_the_list_of_nodes_becomes_a_tree() -> None:
    sizes = [(None, 4), (None, 9), (0, 2), (0, 3), (2, 1)]
    nodes = [{"parent": parent, "num_tokens": size, "hits": 0} for parent, size in sizes]
    grandchild = CacheNode(1, 0, ())
    first = CacheNode(4, 0, (CacheNode(2, 0, (grandchild,)), CacheNode(3, 0, ())))
    assert demo.tree_of(nodes) == CacheNode(0, 0, (first, CacheNode(9, 0, ())))
