"""The questions of `mmlu`, with stock vLLM asked as well as it can be: one request, one token.

The token is held to the four labels by a regular expression. That is exact for any model, and takes
no longer than a token without it, within what can be measured. The log-probabilities of the
likeliest tokens, of which vLLM tells at most 20, take as long, and are no answer where a label is
not among them, as with models that were never trained to answer so.

With the plugin the label is chosen by `select`, from the log-probabilities of four prompts. Both
choose the likeliest label, and so the same one, unless two labels are so nearly equally likely that
the order of summing decides, which may differ between the last token of a prompt and a generated
one. In an exact tie `select` takes the first label, a sampler the token with the lowest number.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads import mmlu
from benchmarks.ab.workloads.base import Workload


@sgl.function
def choice_by_one_token(s: sgl.ProgramState, examples: str, question: str, right: str) -> None:
    """`right` is for the score alone."""
    s += examples
    s += question
    s += sgl.gen("label", max_tokens=1, regex=f"[{''.join(mmlu.LABELS)}]")


WORKLOAD = Workload(
    name="mmlu_best",
    summary="the questions of mmlu; stock: one request each, of one token held to the labels",
    gain=(
        "Next to none is possible: both compute the new part of a prompt once. The plugin does so "
        "for four prompts of one more token, and what they share waits for none of them."
    ),
    program=mmlu.choice,
    stock_program=choice_by_one_token,
    items=mmlu.items,
    num_requests=64,
    quick_requests=16,
    score=mmlu.score,
)
