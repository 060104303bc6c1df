"""Questions about images and videos: six of one image, side by side, and a label by `select`.

Owns the pictures, which are mosaics of random colors. A video is its frames in order, as images:
most models that take videos need torchvision, which CPU installs of vLLM do not have.
"""

from __future__ import annotations

import io
from functools import partial

import numpy as np

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload, usual_server_args

NUM_QUESTIONS = 6
QUESTION_TOKENS = (8, 16)
ANSWER_TOKENS = (6, 12)
NUM_LABELS = 3
LABEL_TOKENS = 2
NUM_FRAMES = 6

PIXELS = 448
TILES = 8
"""Of a mosaic, in a row: a PNG of it has some hundred bytes."""

MODEL = "shape:vlm-33m"


def server_args(block_size_tokens: int) -> tuple[str, ...]:
    """With the route that says where a prompt's images are: it is how unique tokens are counted."""
    return (*usual_server_args(block_size_tokens), "--enable-scale-out")


@sgl.function
def ask(
    s: sgl.ProgramState,
    images: tuple[bytes, ...],
    questions: tuple[str, ...],
    lengths: tuple[int, ...],
    labels: tuple[str, ...],
) -> str:
    with s.user():
        for image in images:
            s += sgl.image(image)
        s += "Look at this."
    forks = s.fork(len(questions))
    forks += [sgl.user(question) for question in questions]
    forks += [
        sgl.assistant(sgl.gen("answer", min_tokens=length, max_tokens=length)) for length in lengths
    ]
    forks.join()
    s += sgl.user("What is it?")
    s += sgl.assistant("It is" + sgl.select("label", list(labels)))
    return "\n".join(s["answer"])


def items(num_images: int, texts: Texts, num_requests: int) -> list[Item]:
    return [
        {
            "images": tuple(mosaic(texts.rng) for _ in range(num_images)),
            "questions": tuple(
                texts.text(texts.number(*QUESTION_TOKENS)).strip() + "?"
                for _ in range(NUM_QUESTIONS)
            ),
            "lengths": tuple(texts.number(*ANSWER_TOKENS) for _ in range(NUM_QUESTIONS)),
            "labels": tuple(texts.text(LABEL_TOKENS) for _ in range(NUM_LABELS)),
        }
        for _ in range(num_requests)
    ]


def mosaic(rng: np.random.Generator) -> bytes:
    """A PNG of random colors."""
    from PIL import Image

    colors = rng.integers(0, 256, (TILES, TILES, 3), dtype=np.uint8)
    picture = Image.fromarray(colors).resize((PIXELS, PIXELS), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


IMAGE = Workload.of("image_qa", ask, partial(items, 1), model=MODEL, server_args=server_args)
VIDEO = Workload.of(
    "video_qa", ask, partial(items, NUM_FRAMES), model=MODEL, server_args=server_args
)
