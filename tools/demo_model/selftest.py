"""The examination of a trained folder: what the demo model can do, in numbers.

Owns the questions and how answers are judged. Reads the folder as any user would, through
transformers' `AutoTokenizer` and `AutoModelForCausalLM`, decodes greedily, and judges exactly
(an answer is right or wrong, nothing between). Examples are drawn with a seed of their own, so that
few-shot prompts, notes and sums are other ones than those of training, if rarely unseen as facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import exercises, records, texts
from .choice import pick
from .facts import all_facts
from .tokenizer import DOCUMENT_END, TURN_END
from .world import SUBJECTS

Answers = list[tuple[str, str]]  # (expected, given)


@dataclass(frozen=True)
class Score:
    """One examined ability: how many of how many, and some of what went wrong."""

    name: str
    right: int
    total: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.total


class Examinee:
    """A model folder that completes prompts greedily, in batches of prompts of equal length."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = self.tokenizer.convert_tokens_to_ids([TURN_END, DOCUMENT_END])

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
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


def _asked(model: Examinee, questions: Sequence[tuple[list[str], str]]) -> Answers:
    """Expected and given answers of chats; each is user, assistant, ..., user turns."""
    prompts = []
    for turns, _ in questions:
        roles = ("user", "assistant")
        prompts.append(
            model.chat_prompt([{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)])
        )
    given = model.complete(prompts)
    return [(answer + TURN_END, g) for (_, answer), g in zip(questions, given, strict=True)]


def facts(model: Examinee, rng: Random) -> Answers:
    """Every fact, each asked in its first wording and in another."""
    return _asked(
        model,
        [([question], fact.sentence) for fact in all_facts() for question in fact.questions[:2]],
    )


def facts_in_a_word(model: Examinee, rng: Random) -> Answers:
    return _asked(model, [([f.questions[0] + texts.ONE_WORD[0]], f.short) for f in all_facts()])


def follow_ups(model: Examinee, rng: Random) -> Answers:
    """A fact asked with "there", "it" or "she" after another fact about the same subject."""
    questions = []
    for fact in all_facts():
        before = rng.choice(texts.facts_like(fact, all_facts()))
        turns = [before.questions[0], before.sentence, fact.follow_ups[0]]
        questions.append((turns, fact.sentence))
    return _asked(model, questions)


def yes_or_no(model: Examinee, rng: Random) -> Answers:
    everything = all_facts()
    turns = [texts.yes_no(rng, rng.choice(everything), everything) for _ in range(200)]
    return _asked(model, [([user], answer) for user, answer in turns])


def from_notes(model: Examinee, rng: Random) -> Answers:
    """Questions about notes in the prompt."""
    questions = []
    for _ in range(100):
        notes, pairs = exercises.private_notes(rng)
        question, answer = rng.choice(pairs)
        questions.append(([f"{' '.join(notes)}\n{question}"], answer))
    return _asked(model, questions)


def sentiment(model: Examinee, rng: Random) -> Answers:
    reviews = [texts.review(rng) for _ in range(100)]
    return _asked(
        model,
        [([f"Is this review positive or negative? {text}"], label) for text, label in reviews],
    )


def rating(model: Examinee, rng: Random) -> Answers:
    judged = [texts.judged_text(rng) for _ in range(100)]
    return _asked(
        model, [([f"Rate this text from 1 to 5.\n{text}"], str(level)) for text, level in judged]
    )


def combining(model: Examinee, rng: Random) -> Answers:
    """Two or three tips joined into one text."""
    questions = []
    for _ in range(50):
        notes = [f.sentence for f in rng.sample(all_facts(), rng.choice((2, 3)))]
        listed = "\n".join(f"- {note}" for note in notes)
        questions.append(([f"Combine these tips:\n{listed}"], texts.combined(notes)))
    return _asked(model, questions)


def short_texts(model: Examinee, rng: Random) -> Answers:
    """Texts made of sentences that belong to the subject, and then ended."""
    subjects = list(SUBJECTS)
    given = model.complete(
        [model.chat_prompt([{"role": "user", "content": f"Write a short text about {subject}."}])
         for subject in subjects],
        max_tokens=60,
    )  # fmt: skip
    answers = []
    for subject, text in zip(subjects, given, strict=True):
        sentences = text.removesuffix(TURN_END).replace(". ", ".|").split("|")
        belongs = all(
            sentence in choices
            for sentence, choices in zip(sentences, SUBJECTS[subject], strict=False)
        )
        ended = text.endswith(TURN_END) and len(sentences) == len(SUBJECTS[subject])
        answers.append((text if belongs and ended else f"a text about {subject}", text))
    return answers


def few_shot(model: Examinee, rng: Random) -> Answers:
    """Every pattern with five solved examples, in three layouts, four times each."""
    prompts, expected = [], []
    for task in exercises.TASKS:
        for layout in exercises.LAYOUTS[:3]:
            for _ in range(4):
                prompt, answer = exercises.few_shot_prompt(rng, task, layout, num_shots=5)
                prompts.append(prompt)
                expected.append(answer)
    given = model.complete(prompts, max_tokens=12)
    answers = []
    for prompt, answer, text in zip(prompts, expected, given, strict=True):
        asked = prompt.splitlines()[-2]
        answers.append((f"{asked} {answer}", f"{asked} {text.partition(chr(10))[0].strip()}"))
    return answers


def lettered_choice(model: Examinee, rng: Random) -> Answers:
    """Multiple choice with three solved questions before."""
    prompts, letters = [], []
    for _ in range(100):
        solved = [exercises.choice_question(rng) for _ in range(3)]
        question, letter = exercises.choice_question(rng)
        prompts.append("".join(f"{q} {a}\n\n" for q, a in solved) + question)
        letters.append(letter)
    given = model.complete(prompts, max_tokens=1)
    return [(letter, g.strip()) for letter, g in zip(letters, given, strict=True)]


def known_cards(model: Examinee, rng: Random) -> Answers:
    """JSON about things of the world: every value right."""
    return _asked(model, [([user], answer) for user, answer in
                          (records.card_request(rng) for _ in range(60))])  # fmt: skip


def invented_records(model: Examinee, rng: Random) -> Answers:
    """JSON with fields that the prompt names: it parses, has these fields, and plausible values."""
    answers = []
    prompts, wanted = [], []
    for _ in range(60):
        kind = rng.choice(list(records.KINDS))
        keys = records.some_keys(rng, kind)
        prompts.append(model.chat_prompt([{
            "role": "user",
            "content": f"Write a {kind} as JSON with the keys {', '.join(keys)}.",
        }]))  # fmt: skip
        wanted.append(keys)
    for keys, text in zip(wanted, model.complete(prompts, max_tokens=160), strict=True):
        right = _is_plausible(text, keys)
        answers.append((text if right else f"fields {', '.join(keys)}", text))
    return answers


def _is_plausible(text: str, keys: Sequence[str]) -> bool:
    if not text.endswith(TURN_END):
        return False
    try:
        value = json.loads(text.removesuffix(TURN_END))
    except ValueError:
        return False
    if not isinstance(value, dict) or list(value) != list(keys):
        return False
    examples = {key: records.fill(Random(0), key) for key in keys if records.is_known(key)}
    return all(type(value[key]) is type(example) for key, example in examples.items())


def ends_turns(model: Examinee, rng: Random) -> Answers:
    """Chats of the training mixture, cut before their last answer: it ends within 200 tokens."""
    writers: Sequence[Callable[[Random], str]] = [
        w for w in texts.MIX if w.__name__.endswith("chat")
    ]
    prompts = []
    for _ in range(60):
        document = pick(rng, writers, skew=1.0)(rng)
        cut = document.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        prompts.append(document[:cut])
    given = model.complete(prompts, max_tokens=200)
    return [("ended" if g.endswith(TURN_END) else "an end", "ended" if g.endswith(TURN_END) else g)
            for g in given]  # fmt: skip


EXAMINATIONS: dict[str, Callable[[Examinee, Random], Answers]] = {
    "facts in chat": facts,
    "facts in one word": facts_in_a_word,
    "follow-up questions": follow_ups,
    "true, false, yes, no": yes_or_no,
    "answers from notes": from_notes,
    "sentiment": sentiment,
    "rating from 1 to 5": rating,
    "combining tips": combining,
    "short texts": short_texts,
    "few-shot patterns": few_shot,
    "multiple choice": lettered_choice,
    "JSON of known things": known_cards,
    "JSON with named fields": invented_records,
    "ends its turns": ends_turns,
}


def examine(folder: Path, *, seed: int = 1_000_003) -> list[Score]:
    """All examinations of the model in `folder`, in about a minute on two cores."""
    model = Examinee(folder)
    scores = []
    for name, examination in EXAMINATIONS.items():
        answers = examination(model, Random(seed))
        wrong = [pair for pair in answers if pair[0] != pair[1]]
        scores.append(Score(name, len(answers) - len(wrong), len(answers), tuple(wrong)))
    return scores
