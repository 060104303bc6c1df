"""The examples with an image and a video, against the scripted server: what they send."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import sgl_vllm as sgl

EXAMPLES = Path(sgl.__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_questions_are_asked_about_the_same_image(server, backend):
    pytest.importorskip("PIL")
    program = example("image_question")
    state = program.ask.run(program.red_circle())
    assert len(state["answer"]) == 2
    questions = [
        body["messages"]
        for path, body in server.requests
        if path == "/v1/chat/completions" and body not in server.hints
    ]
    assert sorted(messages[-1]["content"] for messages in questions) == sorted(program.QUESTIONS)
    first, second = (messages[0]["content"] for messages in questions)
    assert first == second
    assert [part["type"] for part in first] == ["image_url", "text"]
    assert first[0]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("num_frames", "options"), [(None, None), (4, {"video": {"num_frames": 4}})]
)
def test_a_film_is_sent_whole_and_frames_are_chosen_by_the_server(
    server, backend, num_frames, options
):
    pytest.importorskip("cv2")
    program = example("video_caption")
    state = program.caption.run(program.rolling_ball(), num_frames)
    assert state["caption"] and state["title"]
    for body in server.bodies("/v1/chat/completions"):
        film, instruction = body["messages"][0]["content"]
        assert film["video_url"]["url"].startswith("data:video/mp4;base64,")
        assert instruction["text"] == "Describe this video in a sentence."
        assert body.get("media_io_kwargs") == options
