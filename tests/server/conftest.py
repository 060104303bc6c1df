"""One real `vllm serve` with the plugin for all tests that can share it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.serving import VllmServer

MODEL = os.environ.get("SGL_VLLM_TEST_MODEL", str(MODEL_PATH))
API_KEY = "a-key"


def serve(**options) -> VllmServer:
    options = {"max_model_len": 2048, "served_model_name": "demo", **options}
    return VllmServer(MODEL, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with serve(plugin=True, extra_args=["--api-key", API_KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)
