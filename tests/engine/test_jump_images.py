"""Requests with images jump, and get what decoding one by one gives them. So they do with M-RoPE,
which gives the tokens of an image fewer positions than there are, and so shifts all that follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.models import resolve_model
from tests.effort import requests, some_nightly
from tests.engine.engine import Engine
from tests.engine.one_by_one import decoding_one_by_one

PIXELS = 56
PATTERNS = [
    r'\{"animal": "[A-Z][a-z]{2,5}", "legs, as far as one can see": [0-9], "sleeps": true\}',
    r"I see [a-z ]{3,9} in the picture\. Nothing more can be said about it\.",
]

MODELS = ["vlm-tiny", "mrope-tiny"]
EITHER_MODEL = pytest.mark.parametrize(
    "start_vlm", some_nightly(MODELS, quick=MODELS[:1], marks=[pytest.mark.slow]), indirect=True
)

Prompt = dict[str, Any]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def about(seeds: list[int], question: str) -> Prompt:
    text = "".join(f"Picture {n}: <image>\n" for n in range(len(seeds))) + question
    images = {"multi_modal_data": {"image": [picture(seed) for seed in seeds]}} if seeds else {}
    return {"prompt": text, **images}


def params(pattern: str | None, **more: Any) -> SamplingParams:
    grammar = None if pattern is None else StructuredOutputsParams(regex=pattern)
    options = {"temperature": 0, "max_tokens": 60, **more}
    return SamplingParams(structured_outputs=grammar, **options)


def mixed_requests(count: int) -> list[tuple[Prompt, SamplingParams]]:
    """None to three images, some of them the same after the same text, so that hits reach over
    images; one in four requests without a format."""
    rng = random.Random(5)
    questions = ["What is it?", "What is it? Say it " + "very " * 20 + "briefly.", "Where?"]
    asked = []
    for number in range(count):
        seeds = [rng.randrange(3) for _ in range(number % 4)]
        pattern = None if number % 4 == 3 else rng.choice(PATTERNS)
        asked.append(
            (about(seeds, rng.choice(questions)), params(pattern, max_tokens=rng.choice([12, 60])))
        )
    return asked


def answers(
    engine: Engine, asked: list[tuple[Prompt, SamplingParams]]
) -> list[tuple[list[int], str | None]]:
    prompts, sampling = zip(*asked, strict=True)
    results = engine.llm.generate(list(prompts), list(sampling), use_tqdm=False)
    return [(list(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in results]


@pytest.fixture(scope="module", params=MODELS)
def start_vlm(request, start, tmp_path_factory) -> Callable[..., Engine]:
    model: Path = resolve_model(f"shape:{request.param}", tmp_path_factory.mktemp("models"))

    def start_engine(plugin: dict[str, Any] | None = None, **more: Any) -> Engine:
        arguments = {"model": str(model), "limit_mm_per_prompt": {"image": 3}, "seed": 0, **more}
        engine: Engine = start(plugin, **arguments)
        return engine

    return start_engine


@pytest.fixture(scope="module")
def want(start_vlm) -> list[tuple[list[int], str | None]]:
    stock = start_vlm(async_scheduling=False)
    with decoding_one_by_one(stock.scheduler):
        return answers(stock, mixed_requests(requests(24)))


def test_all_kinds_of_requests_with_images_get_the_right_answer(start_vlm, want):
    # It matters which images there are.
    assert len({tuple(tokens) for tokens, _ in want}) > requests(12)
    engine = start_vlm({})
    assert answers(engine, mixed_requests(requests(24))) == want
    assert answers(engine, mixed_requests(requests(24))) == want  # now with prefix hits over images
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.jump_forward.jumps > requests(40)
    assert stats.jump_forward.errors == 0
    assert stats.radix.hit_tokens > requests(500)
    engine.check_nothing_is_left()


@EITHER_MODEL
def test_an_image_is_encoded_again_if_a_request_is_preempted_after_a_jump(start_vlm):
    """vLLM does not send the pixels of computed images again when a request is resumed."""
    engine = start_vlm({"radix": False, "select": False}, enable_prefix_caching=False)
    pattern = "[a-z]{3} is in the picture, and beside it [a-z]{9} can be seen"
    request = about([1, 2], "What is it?"), params(pattern)
    (wanted,) = answers(engine, [request])
    llm, scheduler = engine.llm.llm_engine, engine.scheduler
    llm.add_request("preempted", *request)
    jumps = scheduler.sgl_vllm.stats().jump_forward.jumps
    while scheduler.sgl_vllm.stats().jump_forward.jumps == jumps or not scheduler.running:
        llm.step()
        assert llm.has_unfinished_requests()
    (victim,) = scheduler.running
    engine.preempt(victim)
    engine.core.reset_encoder_cache()
    (answer,) = engine.finish()["preempted"].outputs
    assert (list(answer.token_ids), answer.finish_reason) == wanted
    engine.check_nothing_is_left()


@EITHER_MODEL
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"mm_processor_cache_type": "shm"}, id="images-in-shared-memory"),
        pytest.param({"long_prefill_token_threshold": 5}, id="jumps-over-several-passes"),
    ],
)
def test_they_get_it_whatever_the_options(start_vlm, want, more):
    engine = start_vlm({}, **more)
    assert answers(engine, mixed_requests(requests(24))) == want
    assert engine.scheduler.sgl_vllm.stats().jump_forward.jumps > requests(40)
    engine.check_nothing_is_left()
