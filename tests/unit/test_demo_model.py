"""The demo model as shipped, and the parts of the script that trains it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.models import DEMO_MODEL
from tools.demo_model import texts
from tools.demo_model.selftest import Examinee
from tools.demo_model.tokenizer import TURN_END, chat_turn, train_tokenizer
from tools.train_demo_model import TOKENIZER_DOCUMENTS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """All is so small that a second thread only waits for the first."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_the_chat_template_writes_what_training_wrote() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    written = "".join(chat_turn(m["role"], m["content"]) for m in messages)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == written
    assert tokenizer.apply_chat_template(
        messages[:2], tokenize=False, add_generation_prompt=True
    ) == written.removesuffix(f"Hello!{TURN_END}\n")


def test_it_fills_json_and_ends_its_turn() -> None:
    model = Examinee(DEMO_MODEL)
    prompt = model.chat_prompt("Fill in a card for the city Paris as JSON.")
    (answer,) = model.complete([prompt], max_tokens=80)
    assert answer.endswith(TURN_END)
    assert json.loads(answer.removesuffix(TURN_END)) == {
        "name": "Paris",
        "country": "France",
        "continent": "Europe",
        "language": "French",
        "river": "Seine",
    }


@pytest.mark.nightly
def test_the_text_is_still_that_of_which_the_shipped_tokenizer_was_made() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = itertools.islice(texts.documents(0), TOKENIZER_DOCUMENTS)
    made = train_tokenizer(text, vocab_size=tokenizer.get_vocab_size())
    assert json.loads(made.to_str()) == json.loads(tokenizer.to_str())
