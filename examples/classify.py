"""Few-shot classification by select, over a batch.

    python examples/classify.py [--url http://127.0.0.1:8000]

select scores every label as the continuation of the prompt and takes the likeliest one.
"""

import argparse

import sgl_vllm as sgl

EXAMPLES = [
    ("I love this film.", "positive"),
    ("What a waste of time.", "negative"),
    ("The best meal in years.", "positive"),
    ("It broke on the first day.", "negative"),
]


@sgl.function
def classify(s, review):
    for text, label in EXAMPLES:
        s += f"Review: {text}\nLabel: {label}\n\n"
    s += f"Review: {review}\nLabel:"
    s += sgl.select("label", [" positive", " negative"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    reviews = ["I love this book.", "What a terrible day.", "The best day in years."]
    for review, state in zip(
        reviews, classify.run_batch([{"review": review} for review in reviews]), strict=True
    ):
        print(f"{review} ->{state['label']}  {state.get_meta_info('label')['scores']}")
