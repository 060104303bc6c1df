"""Notes, and questions whose answer stands in one of them: what the recall model reads.

Owns the made-up names and the texts. A note says where a person is, and then something about the
day: "Note: Rudel Ashford. It rained all day." A question names a person, and the answer is the
place. Persons and places are drawn anew for each document, so the answer has to be read; nothing
can be remembered. `tools/train_recall_model.py` trains on these texts, and
`benchmarks.approximate --recall` asks about them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_STARTS = [
    "Ru",
    "Ash",
    "Oak",
    "Bel",
    "Cor",
    "Dun",
    "El",
    "Fen",
    "Gar",
    "Hol",
    "Is",
    "Jor",
    "Kel",
    "Lin",
    "Mar",
    "Nor",
    "Os",
    "Pel",
    "Quin",
    "Ro",
]
_ENDS = ("del", "vin", "mar", "ric", "nas", "bo", "thin", "lo", "wen", "sa")
_PLACE_ENDS = ("ford", "ham", "ton", "wick", "by", "dale", "port", "mere", "ley", "stead")
PERSONS = [start + end for start in _STARTS for end in _ENDS]
PLACES = [start + end for start in _STARTS for end in _PLACE_ENDS]
_REMARKS = [
    " ".join(words)
    for words in itertools.product(
        ("It rained", "The wind rose", "Snow fell", "The sun shone", "Birds sang", "A dog barked"),
        ("all day.", "at dawn.", "for hours.", "near the gate.", "by the old mill.", "once more."),
    )
]


@dataclass(frozen=True)
class Note:
    person: str
    place: str
    remark: str

    @property
    def text(self) -> str:
        return f"Note: {self.person} {self.place}. {self.remark}\n"

    @property
    def question(self) -> str:
        """The answer is the next word, after a space."""
        return f"? {self.person}"


def notes(rng: random.Random, count: int) -> list[Note]:
    """`count` notes about different persons, at most 200."""
    return [
        Note(person, rng.choice(PLACES), rng.choice(_REMARKS))
        for person in rng.sample(PERSONS, count)
    ]


def segments(rng: random.Random, count: int, notes_each: int) -> list[list[Note]]:
    """Notes about different persons, in `count` parts of a prompt."""
    drawn = notes(rng, count * notes_each)
    return [drawn[start : start + notes_each] for start in range(0, len(drawn), notes_each)]


def text_of(some: Sequence[Note]) -> str:
    return "".join(note.text for note in some)


def documents(seed: int, num_notes: int) -> Iterator[list[tuple[str, bool]]]:
    """Endless documents of notes and then questions about all of them, in another order.

    Each is a list of texts and whether the text is an answer.
    """
    rng = random.Random(seed)
    while True:
        drawn = notes(rng, num_notes)
        parts = [(text_of(drawn), False)]
        for note in rng.sample(drawn, num_notes):
            parts += [(note.question, False), (f" {note.place}", True), ("\n", False)]
        yield parts
