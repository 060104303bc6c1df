"""Two real servers for all tests of a module: with the plugin, and stock.

A server takes half a minute to start. Whoever counts what a shared one computes looks at
differences, and at a cache that it has emptied itself. Modules have their own: hostile grammars
leave gigabytes behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest

import sgl_vllm as sgl
from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.serving import VllmServer

MODEL = os.environ.get("SGL_VLLM_TEST_MODEL", str(MODEL_PATH))
API_KEY = "a-key"


def serve(**options) -> VllmServer:
    defaults = {
        "max_model_len": 2048,
        "served_model_name": "demo",
        # With more, a small model waits for the slowest core at every operation.
        "env": {"OMP_NUM_THREADS": "1"},
    }
    return VllmServer(MODEL, **{**defaults, **options})


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    """With the plugin."""
    # A small share, so that a test can reach it.
    options = ["--api-key", API_KEY, "--plugin-config", "radix_pin_share=0.02"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serve(plugin=True, extra_args=[*options, *tools]) as running:
        yield running


@pytest.fixture(scope="module")
def stock_server() -> Iterator[VllmServer]:
    """Without the plugin."""
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def stock(stock_server) -> sgl.VLLM:
    return sgl.VLLM(stock_server.url)


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)
