"""Retrieval-augmented generation: find the documents that fit a question, and answer from them.

    python examples/rag.py [--url http://127.0.0.1:8000]

The retriever is a few lines of TF-IDF, called as a tool: the program's text is written before the
documents are known. The demo's model answers from memory more than from what it reads, so its
documents tell what it knows; a larger model answers from any.
"""

import argparse
import math
import re

import sgl_vllm as sgl

DOCUMENTS = [
    "The capital of Egypt is Cairo.",
    "People in Egypt eat koshari.",
    "A river in Egypt is the Nile.",
    "The capital of Vietnam is Hanoi.",
    "The currency of Vietnam is the dong.",
    "People in Ghana speak English.",
    "The currency of Ghana is the cedi.",
]


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def retrieve(question: str, count: int = 2) -> str:
    """The `count` documents that share the rarest words with the question, one a line."""
    known = [words_of(document) for document in DOCUMENTS]

    def weight(word: str) -> float:
        return math.log(len(known) / sum(word in words for words in known))

    def score(words: set[str]) -> float:
        return sum(weight(word) for word in words & words_of(question))

    best = sorted(range(len(known)), key=lambda i: -score(known[i]))[:count]
    return "\n".join(f"[{rank}] {DOCUMENTS[i]}" for rank, i in enumerate(best, 1))


@sgl.function
def answer(s: sgl.ProgramState, question: str) -> None:
    s += "Documents:\n" + sgl.tool("documents", retrieve, question)
    s += f"\n\nQuestion: {question}\nAnswer:" + sgl.gen("answer", max_tokens=24, stop="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    questions = ["What is the capital of Egypt?", "What is the currency of Ghana?"]
    for state in answer.run_batch([{"question": q} for q in questions], temperature=0.0):
        print(f"{state.text()}\n{state.usage}\n")
