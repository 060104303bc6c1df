"""A tree of thoughts: propose several next steps, rate each, and go on from the best.

    python examples/tree_of_thought.py [--url http://127.0.0.1:8000] [--width 3] [--keep 2]

Every level forks each kept branch `width` ways. All thoughts of a level are generated in parallel,
then all are rated in parallel; the rating is asked on a copy, so that it leaves no trace in the
branch. The value of a thought is the mean of the grades 1 to 5, weighted by how likely the model
finds each, so that it tells apart what a single grade would not.
"""

import argparse
import math

import sgl_vllm as sgl

LEVELS = ["Give one tip for {topic}.", "Why?"]
GRADES = ["1", "2", "3", "4", "5"]


def ask_for_rating(branch: sgl.ProgramState) -> sgl.ProgramState:
    """A copy of the branch that rates its thought; does not wait."""
    rating = branch.copy()
    rating += sgl.user(f"Rate this text from 1 to 5.\n{branch['thought']}")
    rating += sgl.assistant(sgl.select("grade", GRADES))
    return rating


def value_of(rating: sgl.ProgramState) -> float:
    """The mean grade under the model's own probabilities."""
    weights = [math.exp(score) for score in rating.get_meta_info("grade")["scores"]]
    weighted = sum(int(g) * weight for g, weight in zip(GRADES, weights, strict=True))
    return weighted / sum(weights)


@sgl.function
def tree_of_thought(s: sgl.ProgramState, topic: str, width: int, keep: int) -> list[str]:
    s += sgl.system("You are a helpful assistant.")
    kept = [s]
    for level in LEVELS:
        proposed = []
        for branch in kept:
            forks = branch.fork(width)
            forks += sgl.user(level.format(topic=topic))
            forks += sgl.assistant(sgl.gen("thought", max_tokens=24, temperature=0.7))
            proposed += list(forks)
        ratings = [ask_for_rating(branch) for branch in proposed]
        values = [value_of(rating) for rating in ratings]
        for branch, value in zip(proposed, values, strict=True):
            print(f"  {value:.2f}  {branch['thought']}")
        print(f"best {keep} of {len(proposed)} kept")
        best_first = sorted(range(len(proposed)), key=lambda i: -values[i])
        kept = [proposed[i] for i in best_first[:keep]]
    return [m["content"] for m in kept[0].messages() if m["role"] == "assistant"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--width", type=int, default=3, help="thoughts per kept branch")
    parser.add_argument("--keep", type=int, default=2, help="branches kept per level")
    arguments = parser.parse_args()
    sgl.set_default_backend(sgl.VLLM(arguments.url))

    state = tree_of_thought.run("staying healthy", width=arguments.width, keep=arguments.keep)
    print("best path:", *state.ret_value)
    print(state.usage)
