"""Few-shot classification by the likeliest label, many texts at a time: in the language."""

import sys

import sgl_vllm as sgl

EXAMPLES = [
    ("The film was wonderful.", "positive"),
    ("The soup was terrible.", "negative"),
    ("I found the book lovely.", "positive"),
    ("This hotel is dull.", "negative"),
]
REVIEWS = ["I love this book.", "The game was boring.", "What an excellent trip!"]


@sgl.function
def classify(s, review):
    for text, label in EXAMPLES:
        s += f"Review: {text}\nSentiment: {label}\n"
    s += f"Review: {review}\nSentiment:" + sgl.select("label", [" positive", " negative"])


sgl.set_default_backend(sgl.VLLM(sys.argv[1]))
for state in classify.run_batch([(review,) for review in REVIEWS], num_threads=8):
    scores = state.get_meta_info("label")["scores"]
    print(state["label"], *(f"{score:.2f}" for score in scores))
