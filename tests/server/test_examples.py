"""Every program in `examples/`, as its own process, against one real server with the plugin; and
`select` after an image, whose scores are those of the choices after that image."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

import sgl_vllm as sgl
from benchmarks.models import resolve_model
from sgl_vllm.server_process import VllmServer
from tests.server.conftest import API_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

# A piece of what each prints. Greedy answers of the demo's model are stable where it knows them.
PRINTS = {
    "api_speculation": "call by call ",
    "async_agents": "Japan: Tokyo",
    "character_sheet": '2 bird {"name": "eagle", "legs": 2, "kind": "bird"}',
    "chat": "assistant: The capital of Japan is Tokyo.",
    "classify": "The game was boring.     NEGATIVE",
    "essay_judge": "first impression 5, grade 5",
    "guide": 'The capital of Kenya is Nairobi. | {"name": "Kenya", "capital": "Nairobi"} | Africa',
    "rag": "Answer: The currency of Ghana is the cedi.",
    "react_agent": "Finish[Swahili]\n\nanswer: Swahili",
    "skeleton_of_thought": "2. Sleep eight hours. A good night makes the whole day easier.",
    "tree_of_thought": "best 2 of 6 kept\nbest path: ",
}
NEEDS_VISION = ("image_question", "video_caption")
NEEDS_COMPACT_JSON = ("primitives",)  # tried in test_primitives.py
NEEDS_SPEECH = ("storybook",)  # in tests/unit/lang/test_media_examples.py


def run_example(name: str, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url, *arguments],
        env={**os.environ, "VLLM_API_KEY": API_KEY, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A model with random weights that reads images, and writes nonsense about them."""
    model = resolve_model("shape:vlm-tiny", tmp_path_factory.mktemp("models"))
    with VllmServer(
        model,
        plugin=True,
        extra_args=["--api-key", API_KEY],
        max_model_len=512,
        served_model_name="vlm",
        env={"OMP_NUM_THREADS": "1"},
    ) as running:
        yield running


def test_every_example_is_tried_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *PRINTS,
        *NEEDS_VISION,
        *NEEDS_COMPACT_JSON,
        *NEEDS_SPEECH,
    }


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs_on_the_demo_model(server, name: str) -> None:
    finished = run_example(name, server.url)
    assert finished.returncode == 0, finished.stderr
    assert PRINTS[name] in finished.stdout
    assert finished.stderr == ""


@pytest.mark.parametrize("name", NEEDS_VISION)
def test_an_example_that_needs_another_model_says_which(server, name: str) -> None:
    finished = run_example(name, server.url)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "This example needs a vision-language model" in finished.stderr
    assert "demo is not a multimodal model" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_example_that_finds_no_server_says_how_to_start_one() -> None:
    finished = run_example("chat", "http://127.0.0.1:9")
    assert finished.returncode == 1
    assert "vllm serve MODEL --plugin sgl_vllm" in finished.stderr


def test_the_image_question_is_answered_by_a_model_that_reads_images(vision_server) -> None:
    finished = run_example("image_question", vision_server.url)
    assert finished.returncode == 0, finished.stderr
    assert "Which shape is in the image? " in finished.stdout
    assert "Which color has it? " in finished.stdout
    assert " prompt tokens · " in finished.stdout


def test_a_video_is_refused_by_a_model_that_reads_images_only(vision_server) -> None:
    finished = run_example("video_caption", vision_server.url)
    assert finished.returncode == 1
    assert "This example needs a vision-language model that takes videos" in finished.stderr


# -- select after an image ------------------------------------------------------------------------

QUESTION = "Which animal is it?"
BEGINNING = "It is a "
CHOICES = ["dog", "small cat", "giraffe"]


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def mean_logprob(client: openai.OpenAI, image: bytes, choice: str) -> float:
    """The mean over the choice's tokens, from the log-probabilities of a chat that ends with it."""
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


def test_scores_are_those_of_chats_that_end_with_the_choices(vision_server: VllmServer) -> None:
    client = openai.OpenAI(base_url=f"{vision_server.url}/v1", api_key=API_KEY)
    seen = set()
    for seed in range(3):
        image = picture(seed)
        for _ in range(2):  # the second time from the cache
            state = animal.run(image, backend=sgl.VLLM(vision_server.url, api_key=API_KEY))
            scores = state.get_meta_info("animal")["scores"]
            wanted = [mean_logprob(client, image, choice) for choice in CHOICES]
            assert scores == pytest.approx(wanted, abs=1e-3)
            assert state["animal"] == CHOICES[int(np.argmax(wanted))]
        seen.add(tuple(round(score, 3) for score in scores))
    assert len(seen) == 3, "the scores do not depend on the image"
