"""Few-shot classification by select, over a batch.

    python examples/classify.py [--url http://127.0.0.1:8000]

select scores every label as the continuation of the prompt and takes the likeliest one. The
examples are the same for all reviews: the batch sends them ahead, once.
"""

import argparse
from enum import Enum

import sgl_vllm as sgl

EXAMPLES = [
    ("The film was wonderful.", "positive"),
    ("The soup was terrible.", "negative"),
    ("I found the book lovely.", "positive"),
    ("This hotel is dull.", "negative"),
]


class Label(Enum):
    POSITIVE = " positive"
    NEGATIVE = " negative"


@sgl.function
def classify(s: sgl.ProgramState, review: str) -> None:
    for text, label in EXAMPLES:
        s += f"Review: {text}\nSentiment: {label}\n"
    s += f"Review: {review}\nSentiment:" + sgl.select("label", Label)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    reviews = ["I love this book.", "The game was boring.", "What an excellent trip!"]
    states = classify.run_batch([{"review": review} for review in reviews])
    for review, state in zip(reviews, states, strict=True):
        scores = [f"{score:.2f}" for score in state.get_meta_info("label")["scores"]]
        print(f"{review:24} {state['label'].name:9} of {scores}")
    print(sum((state.usage for state in states), sgl.Usage()))
