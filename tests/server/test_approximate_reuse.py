"""Segments that clients of a real server mark, in chats and completions, reused where they ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

import sgl_vllm as sgl
from sgl_vllm.server_process import VllmServer
from tests.server.conftest import API_KEY, serve

pytestmark = pytest.mark.slow  # a server of its own

DOCUMENTS = [f"{name} lives near the river and is old.\n" * 12 for name in ("Ann", "Bo", "Cy")]
SYSTEM, HEAD, QUESTION = "You read notes.", "Some notes.\n", "Who is old?"


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with serve(
        plugin=True, plugin_config={"approximate_reuse": True}, extra_args=["--api-key", API_KEY]
    ) as running:
        yield running


def marks(documents: list[str], start: int) -> list[int]:
    found = []
    for text in documents:
        found += [start, start + len(text)]
        start += len(text)
    return found


def asked(documents: list[str], start: int, salt: str, reuse: bool) -> dict[str, Any]:
    """Arguments of a request of the official client."""
    extra: dict[str, Any] = {"sgl_segments": marks(documents, start)}
    if reuse:
        extra["sgl_reuse"] = "approximate"
    body = {"vllm_xargs": extra, "cache_salt": salt}
    return {"model": "demo", "max_tokens": 1, "temperature": 0, "extra_body": body}


def chat(client: openai.OpenAI, documents: list[str], salt: str, reuse: bool) -> Any:
    messages: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": HEAD + "".join(documents) + QUESTION},
    ]
    request = asked(documents, len(SYSTEM) + len(HEAD), salt, reuse)
    return client.chat.completions.create(messages=messages, **request)


def complete(client: openai.OpenAI, documents: list[str], salt: str, reuse: bool) -> Any:
    """The chat as a text with special tokens, whose characters the marks count."""
    begin = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{HEAD}"
    prompt = begin + "".join(documents) + QUESTION
    request = asked(documents, len(begin), salt, reuse)
    return client.completions.create(prompt=prompt, **request)


def report(answer: Any) -> dict[str, int] | None:
    return (answer.model_extra["kv_transfer_params"] or {}).get("sgl_reuse")


@pytest.mark.parametrize("ask", [chat, complete])
def test_marked_segments_are_reused_from_another_order(client, ask) -> None:
    name = ask.__name__
    first = ask(client, DOCUMENTS, name, reuse=False)
    assert report(first) is None
    answer = ask(client, DOCUMENTS[::-1], name, reuse=True)
    reused = report(answer)
    assert reused is not None and reused["reused_segments"] == 3
    assert 0.5 * answer.usage.prompt_tokens < reused["reused_tokens"]
    other = ask(client, DOCUMENTS[::-1], f"{name} of another", reuse=True)
    assert report(other) == {"reused_tokens": 0, "reused_segments": 0}


def test_marks_of_a_chat_that_cannot_be_read_are_the_clients_error(client) -> None:
    body = {"vllm_xargs": {"sgl_segments": [5, 2]}}
    messages: Any = [{"role": "user", "content": "Hello there."}]
    with pytest.raises(openai.BadRequestError, match="sgl_segments has to go up"):
        client.chat.completions.create(model="demo", messages=messages, extra_body=body)


@sgl.function
def in_short(s, documents, reuse):
    s += sgl.system(SYSTEM)
    s += sgl.user(HEAD + sgl.any_order(documents, key=documents.index, reuse=reuse) + QUESTION)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))


def test_a_program_with_roles_reuses_them(server) -> None:
    backend = sgl.VLLM(server.url, api_key=API_KEY)
    in_short.run(DOCUMENTS, "approximate", backend=backend)
    usage = in_short.run(DOCUMENTS[::-1], "approximate", backend=backend).usage
    assert 0.5 * usage.prompt_tokens < usage.reused_tokens < usage.prompt_tokens
