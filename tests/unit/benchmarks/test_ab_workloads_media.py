"""Workloads about images and videos, and the mix of the examples."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("PIL")

from PIL import Image

from benchmarks.ab.workloads import WORKLOADS, image_qa, programs
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Texts, Vocabulary
from benchmarks.models import SHAPE_PREFIX, SHAPES, VisionShape
from sgl_vllm.lang.backends.base import ChatPrompt
from tests.unit.lang.scripted import ScriptedBackend

ROOT = Path(__file__).parents[3]
NUM_IMAGES = {"image_qa": 1, "video_qa": image_qa.NUM_FRAMES}


@pytest.mark.parametrize(("name", "num_images"), NUM_IMAGES.items())
def test_six_questions_and_a_label_are_asked_of_the_same_images(
    name: str, num_images: int, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    shown = set()
    for item in workload.items(Texts(vocabulary, 0), 2):
        assert len({*item["images"]}) == num_images
        backend = ScriptedBackend()
        workload.program.run(**item, temperature=0, backend=backend)
        labelled = [one for one in backend.asked if isinstance(one, tuple)]
        assert [choices for _, choices in labelled] == [item["labels"]]
        prompts = [one.prompt for one in backend.requests] + [prompt for prompt, _ in labelled]
        assert len(prompts) == 6 + 1
        for prompt in prompts:
            assert isinstance(prompt, ChatPrompt)
            assert tuple(media.data for media in prompt.media) == item["images"]
        shown.add(item["images"])
    assert len(shown) == 2


def test_the_pictures_have_the_size_that_their_model_reads(vocabulary: Vocabulary) -> None:
    shape = SHAPES[image_qa.MODEL.removeprefix(SHAPE_PREFIX)]
    assert isinstance(shape, VisionShape)
    with Image.open(io.BytesIO(image_qa.mosaic(Texts(vocabulary, 0).rng))) as picture:
        assert (picture.format, picture.size) == ("PNG", (shape.image_size, shape.image_size))
    assert shape.num_image_tokens == 256
    template_tokens = 200
    assert image_qa.NUM_FRAMES * shape.num_image_tokens + template_tokens < MAX_MODEL_LEN


def test_an_example_is_in_the_mix_or_the_page_says_why_it_is_not() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("`programs` leaves out"))
    examples = {path.stem for path in programs.EXAMPLES.glob("*.py")}
    mixed = {name.partition(".")[0] for name in programs.PROGRAMS}
    assert mixed < examples
    paragraph = page[page.index(row) :].partition("\n\n")[0]
    assert {name for name in examples if f"`{name}`" in paragraph} == examples - mixed


@pytest.mark.parametrize("name", ["chat", "essay_judge", "rag", "skeleton_of_thought"])
def test_an_example_runs_in_the_mix_as_it_does_alone(name: str) -> None:
    program, (arguments, *_) = programs.PROGRAMS[name]
    alone, mixed = ScriptedBackend(), ScriptedBackend()
    program.run(**arguments, temperature=0, backend=alone)
    programs.run_one.run(name=name, arguments=arguments, temperature=0, backend=mixed)
    assert alone.prompts
    assert sorted(mixed.prompts) == sorted(alone.prompts)
