"""`select` after an image, on a small vision model with random weights: its scores are those of the
choices after that image."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

import sgl_vllm as sgl
from benchmarks.models import resolve_model
from sgl_vllm.server_process import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION = "Which animal is it?"
BEGINNING = "It is a "
CHOICES = ["dog", "small cat", "giraffe"]


@pytest.fixture(scope="module", params=[True, False], ids=["plugin", "stock"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = resolve_model("shape:vlm-tiny", tmp_path_factory.mktemp("models"))
    with VllmServer(model, plugin=request.param, env={"OMP_NUM_THREADS": "1"}) as running:
        yield running


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def mean_logprob(client: openai.OpenAI, image: bytes, choice: str) -> float:
    """Of the choice's tokens, from all log-probabilities of a chat that ends with it."""
    model = client.models.list().data[0].id

    def tokens_of(answer: str) -> list[tuple[str, float]]:
        """Each token of the chat but the first, by its id, with its log-probability."""
        data = base64.b64encode(image).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
        messages: Any = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=1,
            extra_body={
                "prompt_logprobs": 0,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        )
        rows: Any = completion.model_dump()["prompt_logprobs"]
        return [(token, row[token]["logprob"]) for row in rows if row for token in list(row)[:1]]

    before = tokens_of(BEGINNING)
    # Where a choice changes how the text before it is tokenized, that is scored for all choices.
    wholes = [tokens_of(BEGINNING + choice) for choice in CHOICES]
    start = min(first_difference(before, whole) for whole in wholes)
    ending = [logprob for _, logprob in wholes[CHOICES.index(choice)][start:]]
    return sum(ending) / len(ending)


def first_difference(before: list[tuple[str, float]], whole: list[tuple[str, float]]) -> int:
    """Index of the first token that is not the same; the end of the shorter one if all are."""
    pairs = enumerate(zip(before, whole, strict=False))
    length = min(len(before), len(whole))
    return next((index for index, (one, other) in pairs if one[0] != other[0]), length)


@sgl.function
def animal(s, image):
    s += sgl.user(sgl.image(image) + QUESTION)
    s += sgl.assistant(BEGINNING + sgl.select("animal", CHOICES))


def test_scores_are_those_of_chats_that_end_with_the_choices(server: VllmServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    seen = set()
    for seed in range(3):
        image = picture(seed)
        for _ in range(2):  # the second time from the cache
            state = animal.run(image, backend=sgl.VLLM(server.url))
            scores = state.get_meta_info("animal")["scores"]
            wanted = [mean_logprob(client, image, choice) for choice in CHOICES]
            assert scores == pytest.approx(wanted, abs=1e-3)
            assert state["animal"] == CHOICES[int(np.argmax(wanted))]
        seen.add(tuple(round(score, 3) for score in scores))
    assert len(seen) == 3, "the scores do not depend on the image"
