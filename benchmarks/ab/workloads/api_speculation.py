"""Three fields asked one by one of an endpoint that charges for every prompt (arXiv 2312.07104,
section 5): the client lets a generation run on, and answers the next fields from it.

Here the servers are the same, stock and not, and what is compared is the client with its
speculation against the client without: by the prompt tokens that are paid for. It takes a model
that goes on in the form of the examples, as the demo's does. A random model never does, so that
nothing is saved.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

NUM_TOKENS_AHEAD = 40
MAX_FIELD_TOKENS = 12
NOTE_TOKENS = (8, 24)
LEAD_IN = "Here is a person as JSON: "
PEOPLE = (
    ("Emma", 34, "teacher"),
    ("Jack", 51, "baker"),
    ("Anna", 28, "doctor"),
    ("Tom", 45, "pilot"),
    ("Lucy", 19, "nurse"),
    ("Ben", 63, "farmer"),
)
EXAMPLES = "".join(
    f'{LEAD_IN}{{"name": "{name}", "age": {age}, "job": "{job}"}}\n\n' for name, age, job in PEOPLE
)


def person(s: sgl.ProgramState, note: str) -> None:
    s += EXAMPLES + "Notes:" + note + ".\n" + LEAD_IN
    s += '{"name": "' + sgl.gen("name", max_tokens=MAX_FIELD_TOKENS, stop='"')
    s += '", "age":' + sgl.gen("age", max_tokens=MAX_FIELD_TOKENS, stop=",")
    s += ', "job": "' + sgl.gen("job", max_tokens=MAX_FIELD_TOKENS, stop='"') + '"}\n'


field_by_field = sgl.function(person)
speculating = sgl.function(num_api_spec_tokens=NUM_TOKENS_AHEAD)(person)


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [{"note": texts.text(texts.number(*NOTE_TOKENS))} for _ in range(num_requests)]


WORKLOAD = Workload.of("api_speculation", speculating, items, stock_program=field_by_field)
