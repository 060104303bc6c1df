"""What prompts share when `any_order` chooses the order of the paragraphs that BM25 found.

    python -m benchmarks.segments [--data hotpot_dev_distractor_v1.json] [--questions 1000]
        [--top 5] [--turns 1] [--json FILE]
    python -m benchmarks.segments --url http://127.0.0.1:8000 --stock-url http://127.0.0.1:8001

Each question is asked after the paragraphs that BM25 finds for it, those of a file of HotpotQA
(`--data`) or made-up ones, which are asked about more or less evenly (`--skew`). With `--turns`,
questions are asked in conversations, each after its own paragraphs. The programs are the same in
every arm, but for the order of a question's paragraphs:

    retrieval     as BM25 ranks them
    one by one    `any_order`, a conversation after the other: from what the process has sent
    refer back    the same, and a paragraph that the conversation holds already is not sent again
                  (only with `--turns`)
    run_batch     `any_order`, all in one batch: planned for all of them
    seed          `any_order(seed=0)`: from the texts alone

Without `--url`, no model runs. The prompts are replayed against the plugin's radix tree, one after
the other and with room for all; a stand-in for a tokenizer splits them. Then the orders are
compared with the best ones of a sample, found by exhaustive search, and with a bound: no order
shares more of a prompt than the paragraphs that it has in common with one earlier prompt.

With `--url`, a server runs the prompts, one at a time, those of the arms by turns. Hits are those
that it reports, and each arm has a `cache_salt` of its own. An answer is not a part of the prompts
after it, so that all arms go on alike. Start the server with `--enable-prompt-tokens-details`.
With `--stock-url`, that server is sent every prompt too, and its outputs are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any  # Any: arguments of the program

import sgl_vllm as sgl
from benchmarks.ab.client import TimedVLLM
from benchmarks.command import positive
from benchmarks.oracle_orders import most_continued, most_shared
from benchmarks.retrieval import Bm25, Corpus, conversations, made_up, read_hotpot
from sgl_vllm.lang.backends.base import (
    Backend,
    GenAnswer,
    Generated,
    GenRequest,
    TextPrompt,
    Usage,
)
from sgl_vllm.lang.order_trie import shared_weight
from sgl_vllm.lang.planning import plan
from sgl_vllm.prompt_lint.replay import Words
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree

BLOCK_SIZE = 16
INSTRUCTION = "Answer from these paragraphs.\n\n"
SAMPLE = 40
"""Groups of questions, and single ones, whose best orders are searched for."""

GROUP = 5
"""Questions of a group: one, and those that have most paragraphs in common with it."""


@dataclass(frozen=True)
class Load:
    """Conversations, each of questions by number, and the paragraphs of each question by rank."""

    corpus: Corpus
    found: Sequence[Sequence[int]]
    conversations: Sequence[Sequence[int]]

    @property
    def num_turns(self) -> int:
        return max(map(len, self.conversations))

    @property
    def modes(self) -> list[str]:
        modes = ["retrieval", "one by one", "refer back", "run_batch", "seed"]
        return modes if self.num_turns > 1 else [mode for mode in modes if mode != "refer back"]

    def items(self, mode: str) -> list[dict[str, Any]]:
        """The arguments of `ask`."""
        texts, questions = self.corpus.paragraphs, self.corpus.questions
        turns = [
            [([texts[i] for i in self.found[number]], questions[number]) for number in numbers]
            for numbers in self.conversations
        ]
        return [{"turns": one, "mode": mode} for one in turns]


@dataclass(frozen=True)
class Arm:
    """What one arm's prompts cost.

    `ttft_p50_s` is a server's, and `same_outputs` how many of its outputs were those of stock.
    """

    name: str
    prompts: int
    prompt_tokens: int
    hit_tokens: int
    ttft_p50_s: float | None = None
    same_outputs: int | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens


class Silent(Backend):
    """Generates nothing, at once, and keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    @property
    def name(self) -> str:
        return "no model"

    async def generate(self, request: GenRequest) -> GenAnswer:
        assert isinstance(request.prompt, TextPrompt)
        self.prompts.append(request.prompt.text)
        return GenAnswer((Generated("", "stop"),), Usage(calls=1))


@sgl.function
def ask(s, turns, mode):
    s += INSTRUCTION
    for number, (paragraphs, question) in enumerate(turns):
        if mode == "retrieval":
            s += "".join(paragraphs)
        elif mode == "seed":
            s += sgl.any_order(*paragraphs, seed=0)
        elif mode == "refer back":
            s += sgl.any_order(*paragraphs, repeated="")
        else:
            s += sgl.any_order(*paragraphs)
        s += f"Question: {question}\nAnswer:" + sgl.gen(f"answer{number}", max_tokens=1)
        s += "\n\n"


@sgl.function
def repeat(s, prompt, max_tokens):
    s += prompt + sgl.gen("answer", max_tokens=max_tokens)


def prompts_of(load: Load, mode: str) -> tuple[list[str], list[sgl.ProgramState]]:
    """The prompts of one arm, and its programs' final states. Answers are empty."""
    backend = Silent()
    items = load.items(mode)
    if mode == "run_batch":
        states = ask.run_batch(items, backend=backend, temperature=0.0, num_threads=1)
    else:
        states = [ask.bind(**item).run(backend=backend, temperature=0.0) for item in items]
    return backend.prompts, states


def replayed(name: str, prompts: Sequence[str]) -> Arm:
    """The hits of `prompts` in a radix tree that has room for all."""
    tree, words = RadixTree(BLOCK_SIZE), Words()
    num_tokens = num_hits = num_blocks = 0
    for prompt in prompts:
        tokens = words(prompt)
        packed = pack(tokens)
        match = tree.match_prefix(name, packed)
        num_hits += tree.longest_hit(match, len(tokens) - 1)
        num_tokens += len(tokens)
        blocks = range(num_blocks, num_blocks - (-len(tokens) // BLOCK_SIZE))
        num_blocks = blocks.stop
        tree.insert(name, packed, blocks)
    return Arm(name, len(prompts), num_tokens, num_hits)


def without_model(load: Load) -> tuple[list[Arm], dict[str, list[list[int]]]]:
    """The arms by a replay, and the orders of the first turns of each."""
    arms, orders = [], {}
    for mode in load.modes:
        prompts, states = prompts_of(load, mode)
        arms.append(replayed(mode, prompts))
        firsts = [load.found[numbers[0]] for numbers in load.conversations]
        made = [state.orders() for state in states]
        orders[mode] = [
            [first[i] for i in order[0].order] if order else list(first)
            for first, order in zip(firsts, made, strict=True)
        ]
    return arms, orders


# -- what the best orders would share


@dataclass(frozen=True)
class Oracle:
    """What orders gain over retrieval's, as parts of what the best ones do, and the bound.

    Attributes:
        batch: of groups of questions, planned at once.
        one_by_one: of single questions, after all that were asked before.
        most_hit_tokens: of all prompts, whatever their order. None for conversations.
    """

    batch: float
    one_by_one: float
    most_hit_tokens: int | None


def compared_with_oracle(load: Load, sent: Sequence[Sequence[int]], seed: int) -> Oracle:
    """`sent` are the orders of the first questions as they were asked one by one."""
    rng = random.Random(seed)
    words = Words()
    weights = {i: len(words(text)) for i, text in enumerate(load.corpus.paragraphs)}
    firsts = [load.found[numbers[0]] for numbers in load.conversations]
    gained = best = 0
    for number in rng.sample(range(len(firsts)), min(SAMPLE, len(firsts))):
        group = [firsts[i] for i in _nearest(firsts, number)]
        as_given = shared_weight(group, weights)
        gained += shared_weight(plan(group, weights), weights) - as_given
        best += most_shared(group, weights) - as_given
    batch = gained / best if best else 1.0
    gained = best = 0
    for number in rng.sample(range(len(firsts)), min(SAMPLE, len(firsts))):
        before = sent[:number]
        as_given = _continued(firsts[number], before, weights)
        gained += _continued(sent[number], before, weights) - as_given
        best += most_continued(firsts[number], before, weights) - as_given
    bound = _most_hit_tokens(load, weights, words) if load.num_turns == 1 else None
    return Oracle(batch, gained / best if best else 1.0, bound)


def _nearest(sets: Sequence[Sequence[int]], number: int) -> list[int]:
    """The set `number`, and those that have most in common with it."""
    own = set(sets[number])
    others = (i for i in range(len(sets)) if i != number)
    return [number, *sorted(others, key=lambda i: -len(own.intersection(sets[i])))[: GROUP - 1]]


def _continued(
    order: Sequence[int], before: Sequence[Sequence[int]], weights: dict[int, int]
) -> int:
    return shared_weight([*before, order], weights) - shared_weight(before, weights)


def _most_hit_tokens(load: Load, weights: dict[int, int], words: Words) -> int:
    """A prompt's hit is the beginning of one earlier prompt, so its paragraphs are in both. Only if
    those are all of its own, a part of the question can be in it too."""
    having: dict[int, list[int]] = {}
    num_instruction = len(words(INSTRUCTION))
    total = 0
    for number, ((question,), one) in enumerate(zip(load.conversations, load.found, strict=True)):
        shared: dict[int, int] = {}
        for paragraph in one:
            for earlier in having.setdefault(paragraph, []):
                shared[earlier] = shared.get(earlier, 0) + weights[paragraph]
            having[paragraph].append(number)
        most = max(shared.values(), default=0)
        total += most + (num_instruction if number else 0)
        if most == sum(weights[paragraph] for paragraph in one):
            total += len(words(f"Question: {load.corpus.questions[question]}\nAnswer:")) - 1
    return total


# -- on a server


def on_server(
    load: Load, connect: Callable[[str], TimedVLLM], stock: Backend | None, max_tokens: int
) -> list[Arm]:
    """The arms on a server, a prompt of each by turns; `connect` takes the salt of one. `stock` is
    asked the same."""
    prompts = {mode: prompts_of(load, mode)[0] for mode in load.modes}
    backends = {mode: connect(f"segments-{uuid.uuid4().hex}") for mode in load.modes}
    usage = dict.fromkeys(load.modes, Usage())
    num_same = dict.fromkeys(load.modes, 0)
    asked_first = connect("warm-up")
    repeat.run(prompts["seed"][0], max_tokens, backend=asked_first, temperature=0.0)
    for by_mode in zip(*prompts.values(), strict=True):
        for mode, prompt in zip(load.modes, by_mode, strict=True):
            state = repeat.run(prompt, max_tokens, backend=backends[mode], temperature=0.0)
            usage[mode] += state.usage
            if stock is not None:
                other = repeat.run(prompt, max_tokens, backend=stock, temperature=0.0)
                num_same[mode] += state["answer"] == other["answer"]
    if any(one.cached_prompt_tokens is None for one in usage.values()):
        raise ValueError("the server needs --plugin sgl_vllm or --enable-prompt-tokens-details")
    return [
        Arm(
            mode,
            len(prompts[mode]),
            usage[mode].prompt_tokens,
            usage[mode].cached_prompt_tokens or 0,
            statistics.median(backends[mode].record.ttfts_s),
            num_same[mode] if stock is not None else None,
        )
        for mode in load.modes
    ]


# -- the command


def planning_time_s(num_sets: int = 1000, size: int = 10, num_segments: int = 200) -> float:
    """Of one batch, without tracing its programs."""
    rng = random.Random(0)
    sets = [rng.sample(range(num_segments), size) for _ in range(num_sets)]
    begin = time.perf_counter()
    plan(sets, dict.fromkeys(range(num_segments), 100))
    return time.perf_counter() - begin


def table(arms: Sequence[Arm]) -> str:
    """Hits and computed tokens beside those of the first arm."""
    first = arms[0]
    lines = [f"{'order':<12}{'prompt tokens':>14}{'hits':>11}{'':>8}{'computed':>11}{'':>7}"]
    for arm in arms:
        hits, computed = arm.hit_tokens, arm.computed_tokens
        line = (
            f"{arm.name:<12}{arm.prompt_tokens:>14,}{hits:>11,}"
            f"{hits / max(first.hit_tokens, 1):>7.2f}x"
            f"{computed:>11,}{computed / first.computed_tokens:>6.2f}x"
        )
        if arm.ttft_p50_s is not None and first.ttft_p50_s is not None:
            gain = first.ttft_p50_s / arm.ttft_p50_s
            line += f"  TTFT p50 {arm.ttft_p50_s * 1e3:.1f} ms ({gain:.2f}x)"
        if arm.same_outputs is not None:
            line += f"  same as stock: {arm.same_outputs} of {arm.prompts}"
        lines.append(line)
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.segments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="a file of HotpotQA with paragraphs")
    parser.add_argument("--questions", type=positive, default=1000)
    parser.add_argument("--paragraphs", type=positive, default=1000, help="of the made-up set")
    parser.add_argument(
        "--skew", type=float, default=1.0, help="exponent of the Zipf law of the made-up set"
    )
    parser.add_argument("--top", type=positive, default=5, help="paragraphs per question")
    parser.add_argument("--turns", type=positive, default=1, help="questions per conversation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server with the plugin, which runs the programs")
    parser.add_argument("--stock-url", help="of a stock server with the same model")
    parser.add_argument("--max-tokens", type=positive, default=8, help="of an answer of a server")
    parser.add_argument("--api-key", help="of the servers")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    return parser


def load_of(given: argparse.Namespace) -> Load:
    """Raises ValueError if the data cannot be used."""
    if given.data:
        corpus = read_hotpot(given.data, given.questions)
    else:
        corpus = made_up(given.questions, given.paragraphs, given.skew, given.seed)
    if given.top > len(corpus.paragraphs):
        raise ValueError(f"--top: there are only {len(corpus.paragraphs)} paragraphs")
    index = Bm25(corpus.paragraphs)
    found = [index.top(question, given.top) for question in corpus.questions]
    return Load(corpus, found, conversations(found, given.turns))


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    given = command.parse_args(arguments)
    try:
        load = load_of(given)
    except ValueError as error:
        command.error(str(error))
    document: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(given).items()
        if name not in ("json", "api_key")
    }
    if given.url:
        options = {"api_key": given.api_key}
        arms = on_server(
            load,
            lambda salt: TimedVLLM(given.url, cache_salt=salt, **options),
            sgl.VLLM(given.stock_url, **options) if given.stock_url else None,
            given.max_tokens,
        )
        print(table(arms))
    else:
        arms, orders = without_model(load)
        oracle = compared_with_oracle(load, orders["one by one"], given.seed)
        print(table(arms))
        print(f"of the best orders' gain, on a sample: run_batch {oracle.batch:.1%}, ", end="")
        print(f"one by one {oracle.one_by_one:.1%}")
        if oracle.most_hit_tokens is not None:
            print(f"no order has more hits than {oracle.most_hit_tokens:,}")
        print(f"planning 1,000 programs of 10 segments: {planning_time_s():.2f} s")
        document["oracle"] = asdict(oracle)
    if given.json:
        document["arms"] = [asdict(arm) for arm in arms]
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
