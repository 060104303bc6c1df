"""The examples with images, videos and speech, against scripted servers: what they send."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sgl_vllm as sgl
from tests.unit.lang.media_server import MediaService, drawn, heard, serving

EXAMPLES = Path(sgl.__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.slow
def test_a_storybook_is_drawn_and_read_aloud(tmp_path):
    with serving(MediaService(answer="A hare slept. It lost.")) as service:
        command = [sys.executable, str(EXAMPLES / "storybook.py"), "--url", f"{service.url}/v1"]
        command += ["--model", "chatter", "--speaker", "speaker", "--painter", "painter"]
        ran = subprocess.run(
            [*command, "--size", "32x24", "--out", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("A hare slept. It lost.\n")
    assert (tmp_path / "drawing.png").read_bytes() == drawn("A hare slept. It lost.", 32, 24)
    assert heard((tmp_path / "reading.wav").read_bytes())[0] == "A hare slept. It lost."
    page = (tmp_path / "storybook.html").read_text()
    assert page.count("<audio") == page.count("<img") == 1
    assert sorted(path for path, _ in service.requests[1:]) == [
        "/v1/audio/speech",
        "/v1/images/generations",
    ]
