"""Answers that a chat template leaves out of the next prompt: who learns of it, and what goes."""

from __future__ import annotations

import pytest

from sgl_vllm.programs.continuations import NEAR_TOKENS, Answer, Origin
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, letters, num_cached, put

PROMPT, ANSWER = "a question of some length", "thinking... yes."
ORIGIN = Origin(answer=Answer(len(PROMPT), letters(ANSWER[:8]), "s."), dropped=frozenset({"!!"}))


@pytest.mark.parametrize(
    ("prompt", "num_cached", "dropped"),
    [
        (PROMPT + "yes. And now?", len(PROMPT), {"!!", "s."}),
        (PROMPT + "yes. And now?", len(PROMPT) - NEAR_TOKENS, {"!!", "s."}),
        (PROMPT + ANSWER + " And now?", len(PROMPT + ANSWER), {"!!"}),
        (PROMPT + ANSWER + " And now?", len(PROMPT), {"!!"}),  # it has been evicted
        ("a question of another client", len("a question of "), set()),
    ],
)
def test_a_conversation_learns_from_its_own_next_prompt_only(prompt, num_cached, dropped) -> None:
    assert ORIGIN.dropped_before(letters(prompt), num_cached) == dropped


def test_a_conversation_remembers_few_ends() -> None:
    origin = ORIGIN
    for number in range(100):
        last = origin._replace(answer=origin.answer._replace(last=number))
        origin = origin._replace(dropped=last.dropped_before(letters(PROMPT + "no"), 99))
    assert len(origin.dropped) == 8 and 99 in origin.dropped


def test_a_dropped_answer_goes_before_older_prefixes_and_its_prompt_stays() -> None:
    tree = RadixTree(block_size=2, clock=Clock())
    put(tree, "old!", [1, 2])
    leaf = put(tree, "promptanswer", [3, 4, 5, 6, 7, 8]).own_leaf
    assert leaf is not None
    tree.record_drop(leaf, len("promp"))
    tree.evict(3)
    assert (num_cached(tree, "old!"), num_cached(tree, "promptanswer")) == (4, 6)
