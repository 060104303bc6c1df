"""The texts of the recall model, what carries loss, and its training in the smallest size."""

from __future__ import annotations

import itertools
import random
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import recall
from tools.demo_model.tokenizer import train_tokenizer
from tools.demo_model.training import TrainingPlan
from tools.train_recall_model import SHAPE, TOKENS_PER_NOTE, batches, build


@pytest.fixture(scope="module")
def tokenizer():
    texts = ("".join(text for text, _ in parts) for parts in recall.documents(0, 100))
    return train_tokenizer(itertools.islice(texts, 100), vocab_size=SHAPE.vocab_size)


def test_each_answer_stands_in_the_note_about_its_person() -> None:
    for parts in itertools.islice(recall.documents(3, 9), 20):
        (text, _), *asked = parts
        places = dict(re.findall(r"^Note: (\w+) (\w+)\.", text, re.M))
        assert len(places) == 9
        questions, answers = asked[::3], asked[1::3]
        for (question, _), (answer, is_answer) in zip(questions, answers, strict=True):
            assert is_answer and answer == f" {places[question.removeprefix('? ')]}"


def test_answers_carry_the_loss_and_are_one_token_each(tokenizer) -> None:
    length = 10 * TOKENS_PER_NOTE
    tokens, targets, trained = next(batches(tokenizer, length, 3 * length, seed=0))
    assert tokens.shape == targets.shape == trained.shape == (3, length)
    assert trained.sum(dim=1).tolist() == [10, 10, 10]
    answers = [tokenizer.decode([token]) for token in targets[trained].tolist()]
    assert {answer.strip() for answer in answers} <= {*recall.PLACES}


def test_segments_are_about_different_persons() -> None:
    parts = recall.segments(random.Random(0), 8, 5)
    assert [len(part) for part in parts] == [5] * 8
    assert len({note.person for part in parts for note in part}) == 40


def test_training_writes_a_model_and_says_how_much_is_right(tmp_path) -> None:
    plan = TrainingPlan(steps=2, tokens_per_step=216, row_lengths=((72, 1.0),))
    shares = build(tmp_path, plan, seed=0, num_workers=1)
    assert shares.keys() == {72} and 0 <= shares[72] < 0.5
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()
