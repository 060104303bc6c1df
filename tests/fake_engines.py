"""vLLM's engine client as the server's routes see it, with answers that a test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeResponse
from vllm.lora.request import LoRARequest

from sgl_vllm.programs.admission import AdmissionGauges
from sgl_vllm.routes import SglEndpointPlugin

TURNS = asdict(AdmissionGauges(12, 90_000, 1_204_331, 14.2, hold_s=4.216, again_per_new=1.83))
NO_TURNS = TURNS | {"held": 0, "holding_s": 0.0, "hold_s": 0.0, "again_per_new": 0.31}
NO_AGENTS = asdict(AdmissionGauges())
TURNS_IN_WORDS = (
    "agents have taken turns for 14 s: 12 requests held back, for up to 4.2 s each; "
    "1.8 tokens recomputed per new one; 1,204,331 cached tokens read while taking turns, "
    "since start"
)
"""What commands and the page say of `TURNS`."""

NO_TURNS_IN_WORDS = "agents do not take turns: 0.31 tokens recomputed per new one"


def tokens_of(text: str) -> list[int]:
    """This engine's tokens are characters."""
    return [ord(character) for character in text]


def node(parent: int | None, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A node of an engine's answer; what is not said is an idle, unlocked, fresh one's."""
    defaults = {
        "namespace": 0,
        "num_blocks": num_tokens // 16,
        "num_locked_blocks": 0,
        "num_pinned_blocks": 0,
        "hits": 0,
        "age_s": 1.0,
        "wanted": False,
    }
    return {"parent": parent, "num_tokens": num_tokens, **defaults, **fields}


def tree_answer(nodes: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """An engine's answer to "tree", with totals that fit the nodes."""
    num_blocks = sum(node["num_blocks"] for node in nodes)
    locked = sum(node["num_locked_blocks"] for node in nodes)
    answer = {
        "block_size": 16,
        "policy": "lru",
        "total_blocks": num_blocks + 100,
        "free_blocks": 100,
        "num_tokens": sum(node["num_tokens"] for node in nodes),
        "num_nodes": len(nodes),
        "num_blocks": num_blocks,
        "num_protected_blocks": locked,
        "num_evictable_blocks": num_blocks - locked,
        "num_pinned_blocks": sum(node["num_pinned_blocks"] for node in nodes),
        "isolated": {"namespaces": 0, "num_tokens": 0, "num_nodes": 0, "num_blocks": 0},
        "nodes_left_out": 0,
        "nodes": nodes,
    }
    return {**answer, **fields}


class FakeEngine:
    """One engine with the plugin: `answers[what]` is a value, or a function of the arguments.

    Values travel as from a real engine's process, in built-in types. None is an engine's answer
    without the plugin.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = answers
        self.asked: list[tuple[str, dict[str, Any] | None]] = []

    def answer(self, what: str, arguments: dict[str, Any] | None) -> Any:
        self.asked.append((what, arguments))
        answer = self.answers.get(what)
        if callable(answer):
            answer = answer(**(arguments or {}))
        return msgspec.to_builtins(answer)


class FakeClient:
    """An `EngineClient` over fake engines; `computed` is what `generate` was asked to run."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = list(engines)
        self.engine_core = self
        self.renderer = self
        self.computed: list[dict[str, Any]] = []
        self.resets = True
        self.errored = False

    @property
    def core_engines(self) -> list[FakeEngine]:
        return self.engines

    async def call_utility_all_async(
        self, method: str, what: str, arguments: dict[str, Any] | None = None
    ) -> list[Any]:
        assert method == "sgl_vllm_call"
        return [engine.answer(what, arguments) for engine in self.engines]

    async def tokenize_prompt_async(self, prompt: dict[str, Any], params: Any) -> dict[str, Any]:
        assert params.needs_detokenization
        return {"prompt": "".join(map(chr, prompt["prompt_token_ids"]))}

    async def reset_prefix_cache(self) -> bool:
        return self.resets

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[None]:
        if len(prompt["prompt_token_ids"]) > 1000:
            raise ValueError("the prompt is longer than 1000 tokens")
        self.computed.append({"prompt": prompt, "params": sampling_params, **options})
        yield None


class FakeTokenization:
    """vLLM's `/tokenize`: a chat is its contents, each behind a "|"."""

    async def create_tokenize(self, wanted: Any, request: Any) -> TokenizeResponse:
        if isinstance(wanted, TokenizeChatRequest):
            text = "".join(f"|{message['content']}" for message in wanted.messages)
            text += "|" if wanted.add_generation_prompt else ""
        else:
            text = wanted.prompt
        tokens = tokens_of(text)
        return TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=1000)


def fake_server(*engines: FakeEngine, api_key: str | None = None, root_path: str = "") -> FastAPI:
    """An app with our routes as vLLM builds it; `app.state.engine_client` is the FakeClient."""
    app = FastAPI(root_path=root_path)
    SglEndpointPlugin().attach_router(app)
    if api_key is not None:
        app.add_middleware(AuthenticationMiddleware, tokens=[api_key])
    app.state.engine_client = FakeClient(*engines)
    app.state.serving_tokenization = FakeTokenization()
    lora = LoRARequest("french", 1, "/nowhere")
    app.state.openai_serving_models = SimpleNamespace(
        is_base_model=lambda name: name == "base", lora_requests={"french": lora}
    )
    return app
