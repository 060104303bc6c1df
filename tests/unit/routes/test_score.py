"""What `POST /v1/sgl/score` takes, and what it says of all else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sgl_vllm.routes.score import begins_with
from tests.fake_engines import FakeEngine, fake_server

A, AB = {"prompt": "a"}, {"prompt": "ab"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def refusal(body: Any) -> tuple[int, str]:
    client = TestClient(fake_server(FakeEngine()))
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/sgl/score", content=json.dumps(body), headers=headers)
    return answer.status_code, answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "the body must be a JSON object"),
        ({}, "prompt: Field required"),
        ({"prompt": "a", "continuations": ["ab"]}, "prompt: must be an object with"),
        ({"prompt": A}, "continuations: Field required"),
        ({"prompt": A, "continuations": [AB, "ab"]}, "continuations.1: must be an object"),
        ({"prompt": A, "continuations": [AB] * 1025}, "at most 1024 items"),
        *(
            (
                {"prompt": chat(user(part)), "continuations": [chat(user(part))]},
                "only prompts of text can be scored",
            )
            for part in ([5], [None], [["a"]], ["a", {"type": "text", "text": "b"}, 7])
        ),
        ({"prompt": A, "continuations": [AB], "wram": 1}, "unknown key 'wram'; did you mean warm?"),
        ({"prompt": A, "continuations": [AB], "x\n" * 999: 1}, r"unknown key 'x\nx\n"),
        (
            {"prompt": A, "continuations": [AB], "warm": "yes"},
            "warm: Input should be",
        ),
        (
            {"prompt": A, "continuations": [AB], "cache_salt": 5},
            "cache_salt: Input",
        ),
        ({"prompt": A, "continuations": [AB], "cache_salt": "x" * 200}, "at most 128 characters"),
        ({"prompt": {"prompt": 5}, "continuations": [AB]}, "prompt cannot be read: prompt: Input"),
        ({"prompt": A, "continuations": [AB, {}]}, "a continuation cannot be read: prompt: Field"),
        ({"prompt": chat("a"), "continuations": [AB]}, "prompt cannot be read: messages"),  # type: ignore[arg-type]
        ({"prompt": A, "continuations": [AB, {"prompt": "b"}]}, "each continuation must begin"),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_in_one_sentence(body: Any, sentence: str) -> None:
    status, said = refusal(body)
    assert status == 400
    assert sentence in said
    assert said.isprintable() and len(said) < 400 and "validation error" not in said


HI, HO = user("Hi"), user("Ho")


@pytest.mark.parametrize(
    ("prompt", "continuation", "continues"),
    [
        (A, AB, True),
        (A, A, True),
        ({"prompt": ""}, A, True),
        (chat(HI), chat(HI, assistant("Ho"), add_generation_prompt=False), True),
        (chat(HI, assistant("It")), chat(HI, assistant("It was")), True),
        (chat(user([{"type": "text", "text": "Hi"}])), chat(HI, assistant("Ho")), True),
        ({"prompt": "The capital is"}, {"prompt": "Lima"}, False),
        (A, chat(user("a")), False),
        (chat(user("a")), A, False),
        (chat(HI), chat(HO, assistant("a")), False),
        (chat(HI), chat(assistant("Hi")), False),
        (chat(HI, HO), chat(HI), False),
        (chat(HI, assistant("It was")), chat(HI, assistant("It")), False),
    ],
)
def test_a_continuation_begins_with_the_prompt(
    prompt: Any, continuation: Any, continues: bool
) -> None:
    assert begins_with(continuation, prompt) is continues
