"""A JSON object written by the program, which asks for its five values one by one.

What is forced here is the program's own text between the values: a prompt of the next request, of
which the cache should have all but those few tokens. Of the values little is forced. Each one ends
within its tokens, whatever is decided: no regular expression allows more characters than that.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

PROMPT_TOKENS = (32, 96)

_NAME = "[A-Z][a-z]{2,6}"
_LANGUAGE = "[A-Z][a-z]{2,8}"
# Text before the value, its name, at most so many tokens (the end of the sequence is one of them),
# and its form.
FIELDS = (
    ('{"name": "', "name", 8, _NAME),
    ('", "country": "', "country", 8, _NAME),
    ('", "latitude": ', "latitude", 8, r"-?[1-8][0-9]\.[0-9]{1,2}"),
    (', "population": ', "population", 8, "[1-9][0-9]{3,6}"),
    (', "languages": ["', "languages", 24, f'{_LANGUAGE}", "{_LANGUAGE}'),
)
END = '"]}\n'


@sgl.function
def card(s: sgl.ProgramState, article: str) -> None:
    s += "Notes on a city:" + article + "\nA card with what they say:\n"
    for before, name, max_tokens, form in FIELDS:
        s += before + sgl.gen(name, max_tokens=max_tokens, regex=form)
    s += END


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [{"article": texts.text(texts.number(*PROMPT_TOKENS))} for _ in range(num_requests)]


WORKLOAD = Workload.of("json_fields", card, items, structured=True)
