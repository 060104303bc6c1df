"""The examination of a trained folder: what the demo model can do, in numbers.

Owns the questions and how answers are judged. Reads the folder as any user would, through
transformers' `AutoTokenizer` and `AutoModelForCausalLM`, decodes greedily, and judges exactly
(an answer is right or wrong, nothing between). Examples are drawn with a seed of their own, so that
few-shot prompts, notes and sums are other ones than those of training, if rarely unseen as facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import exercises, records, texts
from .facts import ALL_FACTS
from .tokenizer import DOCUMENT_END, TURN_END
from .world import WORDINGS

Answers = Iterable[tuple[str, str]]  # (expected, given)


@dataclass(frozen=True)
class Score:
    """One examined ability: how many of how many, and some of what went wrong."""

    name: str
    right: int
    total: int
    wrong: list[tuple[str, str]]


class Examinee:
    """A model folder that completes prompts greedily, in batches of prompts of equal length."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = self.tokenizer.convert_tokens_to_ids([TURN_END, DOCUMENT_END])

    def chat_prompt(self, *turns: str) -> str:
        """A chat that begins with the user."""
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": turn}
            for number, turn in enumerate(turns)
        ]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def complete(self, prompts: Sequence[str], *, max_tokens: int = 40) -> list[str]:
        """The text after each prompt, up to and including `<|im_end|>` or `<|endoftext|>`."""
        encoded = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(encoded):
            by_length.setdefault(len(ids), []).append(i)
        answers = [""] * len(prompts)
        for indices in by_length.values():
            batch = torch.tensor([encoded[i] for i in indices])
            output = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self.ends,
                pad_token_id=self.ends[1],
            )
            for i, generated in zip(indices, output[:, batch.shape[1] :].tolist(), strict=True):
                end = next((k for k, t in enumerate(generated) if t in self.ends), len(generated))
                answers[i] = self.tokenizer.decode(generated[: end + 1])
        return answers


# ---- questions in chats, whose answers are to be the expected ones ------------------------------

Question = tuple[Sequence[str], str]
"""The turns of a chat, and the answer."""


def _facts(rng: Random) -> Iterator[Question]:
    """Every fact, each asked in its first wording and in another."""
    for fact in ALL_FACTS:
        yield from (([question], fact.sentence) for question in fact.questions[:2])


def _follow_ups(rng: Random) -> Iterator[Question]:
    """A fact asked with "there", "it" or "she" after another fact about the same subject."""
    for fact in ALL_FACTS:
        before = rng.choice(texts.facts_like(fact, ALL_FACTS))
        yield [before.questions[0], before.sentence, fact.follow_ups[0]], fact.sentence


def _one_word(rng: Random) -> Iterator[Question]:
    for fact in ALL_FACTS:
        yield [fact.questions[0] + WORDINGS["one_word"][0]], fact.short


def _cards(rng: Random) -> Iterator[Question]:
    """JSON about things of the world: every value right."""
    for _ in range(60):
        user, answer = records.card_request(rng)
        yield [user], answer


# ---- what is judged otherwise -------------------------------------------------------------------


def _few_shot(model: Examinee, rng: Random) -> Answers:
    """Every pattern with five solved examples, in three layouts, four times each."""
    asked = [
        exercises.few_shot_prompt(rng, task, layout, num_shots=5)
        for task in exercises.TASKS
        for layout in exercises.LAYOUTS[:3]
        for _ in range(4)
    ]
    given = model.complete([prompt for prompt, _ in asked], max_tokens=12)
    for (prompt, answer), text in zip(asked, given, strict=True):
        question = prompt.splitlines()[-2]
        yield f"{question} {answer}", f"{question} {text.partition(chr(10))[0].strip()}"


def _ends_turns(model: Examinee, rng: Random) -> Answers:
    """Chats of the training mixture, cut before their last answer: it ends within 200 tokens."""
    writers = [writer for writer in texts.MIX if writer.__name__.endswith("chat")]
    head = "<|im_start|>assistant\n"
    prompts = []
    for _ in range(60):
        before, _, _ = writers[int(len(writers) * rng.random())](rng).rpartition(head)
        prompts.append(before + head)
    for given in model.complete(prompts, max_tokens=200):
        yield "an end", "an end" if given.endswith(TURN_END) else given


QUESTIONS: dict[str, Callable[[Random], Iterator[Question]]] = {
    "facts in chat": _facts,
    "facts in one word": _one_word,
    "follow-up questions": _follow_ups,
    "JSON of known things": _cards,
}
OTHERS: dict[str, Callable[[Examinee, Random], Answers]] = {
    "few-shot patterns": _few_shot,
    "ends its turns": _ends_turns,
}


def examine(folder: Path, *, seed: int = 1_000_003) -> Iterator[Score]:
    """All examinations of the model in `folder`, in less than a minute on two cores."""
    model = Examinee(folder)

    def asked(questions: list[Question]) -> Answers:
        given = model.complete([model.chat_prompt(*turns) for turns, _ in questions])
        return [(answer + TURN_END, g) for (_, answer), g in zip(questions, given, strict=True)]

    for name in (*QUESTIONS, *OTHERS):
        rng = Random(seed)
        made = asked([*QUESTIONS[name](rng)]) if name in QUESTIONS else OTHERS[name](model, rng)
        answers = [*made]
        wrong = [pair for pair in answers if pair[0] != pair[1]]
        yield Score(name, len(answers) - len(wrong), len(answers), wrong)
