"""Questions, and the paragraphs that BM25 finds for each: HotpotQA's, or made up.

Owns the reading of HotpotQA's files, the made-up set, the search, and how questions become
conversations. Asks no model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: JSON

import numpy as np

PARAGRAPHS_PER_TOPIC = 10
SENTENCES_PER_PARAGRAPH = (4, 7)
WORDS_PER_SENTENCE = (10, 18)
_SYLLABLES = ("ra", "mo", "ti", "lu", "se", "kan", "vor", "del", "pin", "osh", "wem", "gar")
_FUNCTION_WORDS = (
    "the",
    "of",
    "and",
    "in",
    "to",
    "was",
    "is",
    "a",
    "for",
    "on",
    "as",
    "with",
    "by",
)


@dataclass(frozen=True)
class Corpus:
    """Paragraphs, each a text, and questions about them."""

    paragraphs: tuple[str, ...]
    questions: tuple[str, ...]


def read_hotpot(path: Path, num_questions: int) -> Corpus:
    """The first questions of a file of HotpotQA, and the paragraphs of all its questions.

    The file is one of those with a `context`, such as ``hotpot_dev_distractor_v1.json`` or
    ``hotpot_dev_fullwiki_v1.json``: a list of ``{"question": str, "context": [[title, [sentence,
    ...]], ...]}``. Raises ValueError for another one.
    """
    paragraphs: dict[str, None] = {}
    questions = []
    try:
        for entry in json.loads(path.read_text()):
            questions.append(entry["question"])
            paragraphs |= dict.fromkeys(_paragraph(*one) for one in entry["context"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no file of HotpotQA with paragraphs ({error!r}): "
            "give hotpot_dev_distractor_v1.json"
        ) from error
    if not paragraphs:
        raise ValueError(f"{path} has no paragraphs")
    return Corpus(tuple(paragraphs), tuple(questions[:num_questions]))


def _paragraph(title: str, sentences: Sequence[str]) -> str:
    return f"{title}: {''.join(sentences).strip()}\n\n"


def made_up(num_questions: int, num_paragraphs: int, skew: float, seed: int) -> Corpus:
    """A corpus of the form of HotpotQA's: each question names two paragraphs of one topic.

    Paragraphs have 40 to 126 words. The topic of rank r, and within it the paragraph of rank r, are
    asked about with a weight of ``1 / r**skew``: with 0, everything equally often.
    """
    rng = np.random.default_rng(seed)
    num_topics = -(-num_paragraphs // PARAGRAPHS_PER_TOPIC)
    names = _names(2 * num_paragraphs + 20 * num_topics + 400, rng)
    general = [*_FUNCTION_WORDS, *(names.pop() for _ in range(400))]
    topics = [[names.pop() for _ in range(20)] for _ in range(num_topics)]
    titles = [f"{names.pop()} {names.pop()}".title() for _ in range(num_paragraphs)]

    def words(topic: int, number: int) -> list[str]:
        return [
            topics[topic][rng.integers(20)]
            if rng.random() < 0.25
            else general[min(int(rng.zipf(1.3)), len(general)) - 1]
            for _ in range(number)
        ]

    paragraphs = []
    for number, title in enumerate(titles):
        sentences = [
            " ".join(words(number // PARAGRAPHS_PER_TOPIC, int(rng.integers(*WORDS_PER_SENTENCE))))
            for _ in range(rng.integers(*SENTENCES_PER_PARAGRAPH))
        ]
        paragraphs.append(_paragraph(title, [f"{title} {one}. " for one in sentences]))
    members = [
        range(first, min(first + PARAGRAPHS_PER_TOPIC, num_paragraphs))
        for first in range(0, num_paragraphs, PARAGRAPHS_PER_TOPIC)
    ]
    questions = []
    for topic in rng.choice(num_topics, num_questions, p=_zipf(num_topics, skew)):
        of_topic = members[topic]
        named = rng.choice(
            of_topic, min(2, len(of_topic)), replace=False, p=_zipf(len(of_topic), skew)
        )
        about = " and ".join(titles[number] for number in named)
        questions.append(f"Which {' '.join(words(topic, 6))} of {about}?")
    return Corpus(tuple(paragraphs), tuple(questions))


def _names(count: int, rng: np.random.Generator) -> list[str]:
    """Different words of two to five syllables, in random order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_SYLLABLES, rng.integers(2, 6)))] = None
    return list(found)


def _zipf(count: int, skew: float) -> Any:
    weights = np.arange(1, count + 1, dtype=float) ** -skew
    return weights / weights.sum()


class Bm25:
    """Okapi BM25 over `texts` (Robertson and Zaragoza, 2009), with ``k1 = 1.2`` and ``b = 0.75``.

    Words are runs of letters and digits in lower case, without stemming or stop words. A search
    costs O(occurrences of the query's words in the corpus).
    """

    K1 = 1.2
    B = 0.75

    def __init__(self, texts: Sequence[str]) -> None:
        self._num_texts = len(texts)
        counts = [Counter(_words(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], dtype=float)
        norm = self.K1 * (1 - self.B + self.B * lengths / max(lengths.mean(), 1.0))
        having: dict[str, list[int]] = {}
        for number, count in enumerate(counts):
            for word in count:
                having.setdefault(word, []).append(number)
        self._postings: dict[str, tuple[Any, Any]] = {}
        """For each word, the texts that have it, and what it adds to their scores."""
        for word, numbers in having.items():
            frequency = np.array([counts[number][word] for number in numbers], dtype=float)
            rarity = np.log(1 + (len(texts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            score = rarity * frequency * (self.K1 + 1) / (frequency + norm[numbers])
            self._postings[word] = np.array(numbers), score

    def top(self, query: str, count: int) -> list[int]:
        """The numbers of the `count` best texts, the best first; ties go to the first text."""
        scores = np.zeros(self._num_texts)
        for word in _words(query):
            if word in self._postings:
                numbers, score = self._postings[word]
                scores[numbers] += score
        return [int(number) for number in np.argsort(-scores, kind="stable")[:count]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def conversations(found: Sequence[Sequence[int]], num_turns: int) -> list[list[int]]:
    """The questions, by number, as conversations of `num_turns`: each begins with the first
    question left, and goes on with the ones whose paragraphs are most often among its own.

    `found` has the paragraphs of each question. Cost: O(questions**2 * num_turns).
    """
    if num_turns == 1:
        return [[number] for number in range(len(found))]
    left = dict.fromkeys(range(len(found)))
    made = []
    while left:
        turns: list[int] = []
        held: set[int] = set()
        while left and len(turns) < num_turns:
            question = max(left, key=lambda number: len(held.intersection(found[number])))
            del left[question]
            turns.append(question)
            held.update(found[question])
        made.append(turns)
    return made
