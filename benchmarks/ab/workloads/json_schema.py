"""JSON held to a schema, another one each time: MaskBench's with `--data`, else made-up ones.

Only schemas that any of vLLM's backends takes and observes (`is_plain`), and no long ones, as the
prompt quotes them. White space is fixed on both servers, which vLLM allows only with a backend by
name: where a model may write as much of it as it likes, next to nothing is forced, and a weak model
writes nothing else.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.schemas import plain_schemas

MAX_SCHEMA_CHARACTERS = 1500
MAX_TOKENS = 256
MAX_MODEL_LEN = 2048


@sgl.function
def value(s: sgl.ProgramState, schema: str) -> None:
    s += sgl.user("Write a record as JSON that fits this schema: " + schema)
    s += sgl.assistant(sgl.gen("value", max_tokens=MAX_TOKENS, json_schema=schema))


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Each schema once in a random order, then all again in another, and so on.

    Raises ValueError if there are none.
    """
    usable = [one.text for one in plain_schemas(texts.data, MAX_SCHEMA_CHARACTERS)]
    if not usable:
        raise ValueError(f"--data: no schema of {MAX_SCHEMA_CHARACTERS} characters or less")
    return [{"schema": usable[index]} for index in texts.order(num_requests, len(usable))]


WORKLOAD = Workload.of(
    "json_schema",
    value,
    items,
    structured=True,
    server_args=lambda block_size_tokens: (
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--structured-outputs-config.backend", "xgrammar"),
        *("--structured-outputs-config.disable_any_whitespace", "true"),
    ),
)
