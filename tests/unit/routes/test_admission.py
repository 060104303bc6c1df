"""What is refused of a request before an engine gets it: always a 400 with a sentence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from benchmarks.schedulers import engine_request
from sgl_vllm.routes.admission import check_params, check_request
from sgl_vllm.routes.incoming import IncomingRequests, read_bodies
from sgl_vllm.routes.tenants import NO_TENANTS

HUGE = "x" * 30_000_000
HALF = "\ud800"


def params(**fields: Any) -> SamplingParams:
    made = SamplingParams()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def refusal(of: EngineCoreRequest) -> str:
    with pytest.raises(VLLMValidationError) as refused:
        check_request(of)
    message = str(refused.value)
    assert message.isprintable() and len(message) < 300
    return message


# -- text that cannot be sent


@pytest.mark.parametrize(
    "broken",
    [
        {"stop": ["good", HALF]},
        {"bad_words": ["\udc00"]},
        {"extra_args": {"sgl_program": HALF}},
        {"extra_args": {HALF: 1}},
        {"extra_args": {"sgl_report": [HALF]}},
        {"extra_args": {"kv_transfer_params": {"host": HALF}}},
        {"extra_args": {"sgl_fork_group": 1 << 64}},
    ],
)
def test_parameters_that_cannot_be_sent_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        check_params(params(**broken))
    assert str(refused.value).isascii()


@pytest.mark.parametrize(
    "broken",
    [
        {"request_id": f"a{HALF}"},
        {"cache_salt": "\udfff"},
        {"session_id": HALF},
        {"reasoning_parser_kwargs": {"chat_template_kwargs": {"a": HALF}}},
    ],
)
def test_a_request_that_cannot_be_sent_is_refused(broken: dict[str, Any]) -> None:
    assert "must be valid Unicode" in refusal(engine_request(**broken))


def test_parameters_are_refused_before_vllm_tokenizes_bad_words() -> None:
    processed: list[Any] = []

    async def add_request(request_id: str, prompt: Any, params: Any, **more: Any) -> str:
        processed.append((request_id, more))
        return "added"

    client: Any = SimpleNamespace(
        output_processor=OutputProcessor(None, log_stats=False), add_request=add_request
    )
    IncomingRequests(NO_TENANTS, lambda: 16).attach(client)
    with pytest.raises(VLLMValidationError, match="bad_words must be valid"):
        asyncio.run(client.add_request("a", {}, params(bad_words=[HALF])))
    assert processed == []
    assert asyncio.run(client.add_request("b", {}, params(), priority=1)) == "added"
    assert processed == [("b", {"priority": 1})]


# -- names that engines keep


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"request_id": HUGE},
            "request_id, with what vLLM adds to it, is too long: 30,000,000 characters",
        ),
        ({"request_id": "x" * 513}, "the limit is 512"),
        ({"cache_salt": HUGE}, "'cache_salt' must be at most 128 characters"),
        ({"lora_request": LoRARequest(HUGE, 1, "/a")}, "the name of the LoRA adapter is too long"),
        ({"lora_request": LoRARequest("a", 1, HUGE)}, "the path of the LoRA adapter is too long"),
    ],
)
def test_longer_names_are_refused(fields: dict[str, Any], name: str) -> None:
    assert name in refusal(engine_request(**fields))


# -- the plugin's own keys


@pytest.mark.parametrize("value", [0, 101, -1, 9999, 1 << 62, "abc", "3", 1.0, [3], True, None])
def test_scores_from_no_index_of_the_prompt_are_refused(value: Any) -> None:
    asked = params(prompt_logprobs=0, extra_args={"sgl_score_from": value})
    said = refusal(engine_request(asked))
    assert said == (
        "sgl_score_from must be an index from 1 to the length of the prompt (100), in a request "
        "with prompt_logprobs"
    )


def test_the_rows_of_embeddings_are_the_prompt() -> None:
    asked = params(prompt_logprobs=0, extra_args={"sgl_score_from": 7})
    embeddings = {"prompt_token_ids": None, "prompt_embeds": torch.zeros(7, 2)}
    check_request(engine_request(asked, **embeddings))
    asked.extra_args = {"sgl_score_from": 8}
    assert "length of the prompt (7)" in refusal(engine_request(asked, **embeddings))


class Renderer:
    async def render_completion(self, request: CompletionRequest, **options: Any) -> list[str]:
        return ["rendered"]

    render_chat = render_completion


@pytest.mark.parametrize("value", [1, "abc"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_scores_cannot_be_combined_with_echo(value: Any, logprobs: int | None) -> None:
    renderer: Any = Renderer()
    read_bodies(renderer, moves_segments=False)
    asked = CompletionRequest(
        prompt="a", echo=True, logprobs=logprobs, vllm_xargs={"sgl_score_from": value}
    )
    with pytest.raises(VLLMValidationError, match="cannot be combined with echo"):
        asyncio.run(renderer.render_completion(asked))
    for other in (
        CompletionRequest(prompt="a", echo=True, logprobs=1),
        CompletionRequest(prompt="a", prompt_logprobs=0, vllm_xargs={"sgl_score_from": 1}),
    ):
        assert asyncio.run(renderer.render_completion(other, skip_mm_cache=True)) == ["rendered"]


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"sgl_reuse": "aproximate", "sgl_segments": [0, 4]}, 'must be "approximate"'),
        ({"sgl_reuse": "approximate"}, "needs sgl_segments"),
        ({"sgl_reuse": "approximate", "sgl_segments": [4, 0]}, "has to go up"),
    ],
)
def test_reuse_that_cannot_be_meant_is_refused(extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        check_params(params(extra_args=extra_args))


# -- the whitespace of JSON


@pytest.mark.parametrize("value", ["tight", "", 1, ["any"]])
def test_an_unknown_whitespace_is_refused(value: Any) -> None:
    sentence = "^sgl_whitespace must be one of any, compact, spaced, follow$"
    with pytest.raises(VLLMValidationError, match=sentence):
        check_params(params(extra_args={"sgl_whitespace": value}))


def test_a_response_format_forbids_whitespace_with_true_or_false() -> None:
    renderer: Any = Renderer()
    read_bodies(renderer, moves_segments=False)
    form = {"type": "json_object", "disable_any_whitespace": "yes"}
    with pytest.raises(VLLMValidationError, match="must be true or false"):
        asyncio.run(renderer.render_chat(CompletionRequest(prompt="a", response_format=form)))
