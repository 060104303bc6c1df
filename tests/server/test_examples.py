"""Every program in `examples/`, as its own process, against one real server with the plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_speculation_saves_calls_and_changes_no_answer(server) -> None:
    """How many calls it saves depends on the text that the model writes past an answer, which
    differs between processors. A call is asked again if its end came among several tokens at
    once, as they do from a busy server: tests/unit/lang counts these exactly."""
    finished = run_example("api_speculation", server.url)
    one_by_one, speculating = re.findall(
        r"(\w+ \w+ \w+ \w+)\n +(\d+) calls, (\d+) prompt tokens,\n +saved (\d+) calls, (\d+)",
        finished.stdout,
    )
    (answers, *costs), (same_answers, *other_costs) = one_by_one, speculating
    calls, tokens, saved_calls, saved_tokens = map(int, costs)
    assert (calls, saved_calls, saved_tokens) == (4, 0, 0)
    assert same_answers == answers
    calls_left, tokens_left, saved_calls, saved_tokens = map(int, other_costs)
    assert saved_calls > 0
    assert calls_left + saved_calls >= calls
    assert tokens_left + saved_tokens >= tokens


@pytest.mark.parametrize("name", NEEDS_VISION)
def test_an_example_that_needs_another_model_says_which(server, name: str) -> None:
    finished = run_example(name, server.url)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "This example needs a vision-language model" in finished.stderr
    assert "demo is not a multimodal model" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", ["chat", "image_question"])
def test_an_example_that_finds_no_server_says_how_to_start_one(name: str) -> None:
    finished = run_example(name, "http://127.0.0.1:9")
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
