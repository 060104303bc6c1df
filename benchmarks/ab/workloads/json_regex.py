"""One regular expression for a whole JSON object, as in the JSON experiments of SGLang's
paper (arXiv 2312.07104): facts about a character of a book.

Nine fixed keys, one nested object, enumerations, bounded strings and numbers. Keys, punctuation and
most of each enumeration are forced; what is left to decide is which of the alternatives, and the
letters of two short strings. The longest text has fewer characters than `MAX_TOKENS`, so any model
comes to its end, whatever it decides.

Words and form are those that the demo's model was trained on. So it splits them into tokens as the
tokenizer does, also where stock vLLM leaves that to it, and both servers write the same text. Other
models may split them otherwise, and then go other ways.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

PROMPT_TOKENS = (8, 24)
MAX_TOKENS = 256

_FIELDS = (
    ("name", '"[A-Z][a-z]{2,7}"'),
    ("house", '"(Gryffindor|Hufflepuff|Ravenclaw|Slytherin)"'),
    ("blood status", '"(Half-blood|Muggle-born|Pure-blood)"'),
    ("occupation", '"(baker|doctor|farmer|nurse|pilot|teacher|writer)"'),
    (
        "wand",
        r'\{"wood": "(elm|holly|oak|pine|willow)", '
        r'"core": "(dragon heartstring|phoenix feather|unicorn hair)", '
        r'"length": 1[0-3]\.[0-9]{1,2}\}',
    ),
    ("alive", "(true|false)"),
    ("patronus", '"(fox|horse|otter|stag|swan)"'),
    ("age", "[1-9][0-9]"),
    ("pet", '"[a-z]{3,8}"'),
)
CHARACTER = r"\{" + ", ".join(f'"{key}": {value}' for key, value in _FIELDS) + r"\}"


@sgl.function
def character(s: sgl.ProgramState, about: str) -> None:
    s += "A character of a book about" + about + ", as JSON:\n"
    s += sgl.gen("character", max_tokens=MAX_TOKENS, regex=CHARACTER)


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [{"about": texts.text(texts.number(*PROMPT_TOKENS))} for _ in range(num_requests)]


WORKLOAD = Workload.of("json_regex", character, items, structured=True)
