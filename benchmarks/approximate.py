"""Approximate reuse against exact answers: what it computes, its time, and how far it is off.

    python -m benchmarks.approximate                       # the demo model, 33M random weights
    python -m benchmarks.approximate --recall FOLDER       # how many answers are right
    python -m benchmarks.approximate --quick --json FILE

For each share of recomputed tokens, and each way to choose them (`approximate_choice`), prompts
show segments in a new order that were computed before in another. Printed are, of the tokens of a
prompt, how many are computed, and the median time to the first token, against an exact request
without a hit, in alternating rounds on one engine in this process. On the demo model, which is
trained, also how far the next token's distribution is from the exact one at some positions of the
exact continuation: the share of positions at which the likeliest token is the same, and the mean KL
divergence in nats.

A share of 100% computes everything, so its agreement is 100%, unless sums are taken in another
order. Random weights pay no attention to anything in particular, so nothing is said of their
answers. `--recall` takes a model that `tools/train_recall_model.py` has trained to answer from its
context, and prints how many of its answers are right too. One engine runs at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import recall
from benchmarks.in_process import prepare_engine_in_this_process
from benchmarks.models import resolve_model

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

    from sgl_vllm.approximate.reuse import ApproximateReuse

SHARES = (0.0, 0.05, 0.15, 0.3, 1.0)
FIRST, DEVIATING = "first", "deviating"
CASES = [(FIRST, share) for share in SHARES] + [(DEVIATING, share) for share in SHARES[1:-1]]
"""How tokens are chosen, and their share. With a share of 0 or 1 there is no choice."""
NUM_SEGMENTS = 8
PLUGIN = {"approximate_reuse": True, "approximate_choice": DEVIATING}
HEAD, QUESTION = "Read these notes.\n", "The hare of crow is"
WORDS = ["hare", "owl", "fox", "hen", "toad", "newt", "crow", "mole", "wasp", "carp", "lynx"]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    segment_tokens: int
    prompts: int
    rounds: int
    positions: int


@dataclass(frozen=True)
class RecallSizes:
    """How much is asked about notes: this many prompts, and questions about each."""

    prompts: int
    questions: int
    notes_per_segment: int


@dataclass
class Row:
    """One share of one model.

    Attributes:
        choice: which tokens are computed, as in `CASES`.
        computed: the tokens of a prompt that are computed, as a share of all.
        ms: median time to the first token. `exact_ms`: of exact requests without a hit.
        agreement, kl: of the next token; None if they were not measured.
        right: the share of questions about notes that were answered right. None without --recall.
    """

    model: str
    choice: str
    share: float
    prompt_tokens: int
    computed: float
    ms: float
    exact_ms: float
    agreement: float | None = None
    kl: float | None = None
    right: float | None = None


class Bench:
    """One engine, and the prompts for it. As a context manager, it stops the engine at the end."""

    def __init__(self, model: str, sizes: Sizes) -> None:
        from vllm import LLM

        self.name, self.sizes = model, sizes
        length = (sizes.segment_tokens + 40) * NUM_SEGMENTS
        self.llm: LLM = LLM(
            model=str(resolve_model(model)),
            max_model_len=length,
            max_num_batched_tokens=length,
            max_logprobs=-1,
            kv_cache_memory_bytes=1 << 30,
            additional_config={"sgl_vllm": PLUGIN},
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        if self.scheduler.parts.approximate is None:
            raise SystemExit("approximate reuse has no effect here: see the log")
        self.reuse: ApproximateReuse = self.scheduler.parts.approximate
        self.num_scheduled = 0
        core: Any = self.llm.llm_engine.engine_core.engine_core
        execute = core.model_executor.execute_model

        def counted(output: Any, **kwargs: Any) -> Any:
            self.num_scheduled += output.total_num_scheduled_tokens
            return execute(output, **kwargs)

        core.model_executor.execute_model = counted

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def segment(self, number: int) -> str:
        """A text of about `segment_tokens` tokens."""
        rng, text, size = random.Random(number), "", self.sizes.segment_tokens
        while len(self.tokenizer.encode(text, add_special_tokens=False)) < size - 12:
            text += (
                f"The {rng.choice(WORDS)} of {rng.choice(WORDS)} {number} is {rng.choice(WORDS)}. "
            )
        return text + "\n"

    def ask(
        self,
        segments: Sequence[str],
        salt: str,
        *,
        reuse: bool,
        head: str = HEAD,
        question: str = QUESTION,
        after: Sequence[int] = (),
        max_tokens: int = 1,
        **params: Any,
    ) -> tuple[RequestOutput, int, float]:
        """A prompt of a head, segments and a question, and tokens after it. Returns the answer, the
        tokens computed, and the seconds that it took."""
        from vllm import SamplingParams

        marks, position = [], len(head)
        for segment in segments:
            marks += [position, position + len(segment)]
            position += len(segment)
        token_ids = [
            token
            for text in (head, *segments, question)
            for token in self.tokenizer.encode(text, add_special_tokens=False)
        ]
        extra = {"sgl_segments": marks, **({"sgl_reuse": "approximate"} if reuse else {})}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **params
        )
        prompt: Any = {"prompt_token_ids": [*token_ids, *after], "cache_salt": salt}
        self.num_scheduled, started = 0, time.perf_counter()
        (output,) = self.llm.generate([prompt], [sampling], use_tqdm=False)
        return output, self.num_scheduled, time.perf_counter() - started

    def rows(self, with_quality: bool) -> list[Row]:
        rng = random.Random(0)
        orders = []
        for number in range(self.sizes.prompts):
            segments = [self.segment(NUM_SEGMENTS * number + i) for i in range(NUM_SEGMENTS)]
            orders.append((segments, rng.sample(segments, NUM_SEGMENTS)))
        rows = []
        for choice, share in CASES:
            self._set(choice, share)
            rows.append(self._measured(choice, share, orders))
            if with_quality:
                rows[-1].agreement, rows[-1].kl = self._quality(orders)
        return rows

    def recall_rows(self, sizes: RecallSizes) -> list[Row]:
        """Of a model that answers from notes. Times are those of prompts of the same segments."""
        rng = random.Random(0)
        prompts = []
        for _ in range(sizes.prompts):
            first, *parts = recall.segments(rng, 1 + NUM_SEGMENTS, sizes.notes_per_segment)
            texts = [recall.text_of(part) for part in parts]
            asked = rng.sample([note for part in parts for note in part], sizes.questions)
            prompts.append((recall.text_of(first), texts, rng.sample(texts, len(texts)), asked))
        orders = [(before, after) for _, before, after, _ in prompts]
        exact = [
            [self._answer(after, f"exact {i}", head, note, reuse=False) for note in asked]
            for i, (head, _, after, asked) in enumerate(prompts)
        ]
        rows = []
        for choice, share in CASES:
            self._set(choice, share)
            row = self._measured(choice, share, orders)
            rows.append(row)
            answers = []
            for i, (head, before, after, asked) in enumerate(prompts):
                salt = f"recall {choice} {share} {i}"
                self.ask(before, salt, reuse=False, head=head)
                for note, of_exact in zip(asked, exact[i], strict=True):
                    answer = self._answer(after, salt, head, note, reuse=True)
                    answers.append((note, answer, of_exact))
            row.right = statistics.mean(
                self._text(answer) == f" {note.place}" for note, answer, _ in answers
            )
            row.agreement, row.kl = _closeness((of_exact, got) for _, got, of_exact in answers)
        return rows

    def _answer(
        self, parts: Sequence[str], salt: str, head: str, note: recall.Note, *, reuse: bool
    ) -> Distribution:
        output, _, _ = self.ask(
            parts, salt, reuse=reuse, head=head, question=note.question, logprobs=-1
        )
        return _distribution(output.outputs[0], 0)

    def _text(self, distribution: Distribution) -> str:
        return str(self.tokenizer.decode([_likeliest(distribution)]))

    def _set(self, choice: str, share: float) -> None:
        self.reuse.deviating, self.reuse.recompute = choice == DEVIATING, share

    def _measured(
        self, choice: str, share: float, orders: Sequence[tuple[list[str], list[str]]]
    ) -> Row:
        computed, times, exact_times, length = [], [], [], 0
        for turn in range(self.sizes.rounds + 1):
            before, after = orders[turn % len(orders)]
            salt = f"{choice} {share} {turn}"
            self.ask(before, salt, reuse=False)
            _, num_tokens, seconds = self.ask(after, salt, reuse=True)
            output, _, exact_seconds = self.ask(after, f"exact {salt}", reuse=False)
            assert output.prompt_token_ids is not None
            length = len(output.prompt_token_ids)
            if turn:  # the first one warms up
                computed.append(num_tokens / length)
                times.append(1e3 * seconds)
                exact_times.append(1e3 * exact_seconds)
        return Row(
            self.name,
            choice,
            share,
            length,
            statistics.mean(computed),
            statistics.median(times),
            statistics.median(exact_times),
        )

    def _quality(self, orders: Sequence[tuple[list[str], list[str]]]) -> tuple[float, float]:
        """Agreement and KL divergence of the next token, at positions of the exact answers."""
        pairs = []
        for number, (before, after) in enumerate(orders):
            num_tokens = self.sizes.positions
            exact, _, _ = self.ask(
                after, f"exact {number}", reuse=False, max_tokens=num_tokens, logprobs=-1
            )
            (answer,) = exact.outputs
            for position in range(num_tokens):
                # No exact hit of what is reused.
                salt = f"quality {self.reuse.deviating} {self.reuse.recompute} {number} {position}"
                self.ask(before, salt, reuse=False)
                so_far = answer.token_ids[:position]
                output, _, _ = self.ask(after, salt, reuse=True, after=so_far, logprobs=-1)
                pairs.append((_distribution(answer, position), _distribution(output.outputs[0], 0)))
        return _closeness(pairs)


# The log-probability of each token as the next one.
Distribution = dict[int, float]


def _distribution(answer: Any, position: int) -> Distribution:
    return {token: one.logprob for token, one in answer.logprobs[position].items()}


def _likeliest(distribution: Distribution) -> int:
    return max(distribution, key=distribution.__getitem__)


def _closeness(pairs: Iterable[tuple[Distribution, Distribution]]) -> tuple[float, float]:
    """Of exact and other distributions: how often the likeliest token is the same, and the mean KL
    divergence of the other from the exact one."""
    same, divergences = [], []
    for exact, other in pairs:
        same.append(_likeliest(exact) == _likeliest(other))
        divergences.append(
            sum(math.exp(one) * (one - other[token]) for token, one in exact.items())
        )
    return statistics.mean(same), statistics.mean(divergences)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "python -m benchmarks.approximate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short segments and few prompts")
    parser.add_argument("--model", action="append", help="demo, shape:NAME or a folder; repeatable")
    parser.add_argument(
        "--recall",
        metavar="FOLDER",
        help="a model by tools/train_recall_model.py, in place of the default models",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    prepare_engine_in_this_process()
    rows: list[Row] = []
    models = options.model or ([] if options.recall else ["demo", "shape:33m"])
    for model in models:
        is_demo = model == "demo"
        if options.quick:
            sizes = Sizes(segment_tokens=96, prompts=2, rounds=2, positions=2)
        elif is_demo:
            sizes = Sizes(segment_tokens=256, prompts=24, rounds=6, positions=6)
        else:
            sizes = Sizes(segment_tokens=512, prompts=4, rounds=8, positions=0)
        with Bench(model, sizes) as bench:
            rows += bench.rows(with_quality=is_demo)
    if options.recall is not None:
        asked = RecallSizes(*((2, 4, 5) if options.quick else (40, 8, 5)))
        with Bench(options.recall, Sizes(96, asked.prompts, 6, 0)) as bench:
            rows += bench.recall_rows(asked)
    print(
        "model        tokens  choice     recomputed  computed     TTFT    exact  agreement"
        "    KL (nats)  right"
    )
    for row in rows:
        quality = "" if row.agreement is None else f"{row.agreement:10.1%} {row.kl:12.4f}"
        right = "" if row.right is None else f"{row.right:6.1%}"
        print(
            f"{Path(row.model).name:12} {row.prompt_tokens:6}  {row.choice:9} {row.share:11.0%}"
            f" {row.computed:9.1%} {row.ms:5.0f} ms {row.exact_ms:5.0f} ms {quality} {right}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
