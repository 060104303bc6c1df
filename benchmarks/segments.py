"""What prompts share when `any_order` chooses the order of their documents.

    python -m benchmarks.segments [--requests 200] [--documents 40] [--top 5] [--json FILE]
    python -m benchmarks.segments --url http://127.0.0.1:8000 [--api-key KEY]

Each request shows a few documents, in random order, and asks a question of its own. Documents are
drawn by a Zipf distribution. The programs are the same in every arm, but for the order:

    given         as drawn
    one by one    `any_order`, a run after the other: from what the process has sent
    run_batch     `any_order`, all in one batch: planned for all of them
    seed          `any_order(seed=0)`: from the texts alone
    local search  from the plan and other starts, to orders that no change of a single request's
                  order improves; the best of them. No proven optimum.

Without `--url`, no model runs: what is shared is counted by a trie of words. With it, the same
programs run on a server, and the tokens are those that it reports as cached; each arm has a
`cache_salt` of its own. Start the server with `--enable-prompt-tokens-details`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any  # Any: arguments of the program

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import Backend, GenAnswer, Generated, GenRequest, Usage
from sgl_vllm.lang.planning import SharedOrders, by_frequency, plan, shared_weight

NUM_STARTS = 5
"""Of the local search."""


@dataclass(frozen=True)
class Arm:
    """What one arm's prompts share.

    `tokens` are those of all documents, or on a server of all prompts; `shared_tokens` are the part
    of them that an earlier prompt began with, or that were cached. `elapsed_s` is the time of all
    runs, on a server only.
    """

    name: str
    tokens: int
    shared_tokens: int
    elapsed_s: float | None = None

    @property
    def share(self) -> float:
        return self.shared_tokens / self.tokens


class Silent(Backend):
    """Generates nothing, at once."""

    @property
    def name(self) -> str:
        return "no model"

    async def generate(self, request: GenRequest) -> GenAnswer:
        return GenAnswer((Generated("", "stop"),), Usage(calls=1))


@sgl.function
def ask(s, documents, question, mode):
    s += "Answer from these documents.\n\n"
    if mode == "given":
        s += "".join(documents)
    elif mode == "seed":
        s += sgl.any_order(*documents, seed=0)
    else:
        s += sgl.any_order(*documents)
    s += question + sgl.gen("answer", max_tokens=1)


def documents_of(count: int, rng: random.Random) -> list[str]:
    """Documents of 40 to 80 words."""
    words = [f"{a}{b}" for a in ("ra", "mo", "ti", "lu", "se") for b in ("n", "k", "s", "del")]
    return [
        f"Document {number}: {' '.join(rng.choices(words, k=rng.randint(37, 77)))}.\n\n"
        for number in range(count)
    ]


def draw(num_requests: int, num_documents: int, top: int, rng: random.Random) -> list[list[int]]:
    """The documents of each request, without repeats, in random order."""
    popularity = [1 / (rank + 1) for rank in range(num_documents)]
    sets = []
    for _ in range(num_requests):
        chosen: list[int] = []
        while len(chosen) < top:
            (number,) = rng.choices(range(num_documents), popularity)
            if number not in chosen:
                chosen.append(number)
        rng.shuffle(chosen)
        sets.append(chosen)
    return sets


def run_arm(
    mode: str, backend: Backend, documents: Sequence[str], sets: Sequence[Sequence[int]]
) -> list[sgl.ProgramState]:
    """The programs of one arm, with their states in the order of the requests."""
    items: list[dict[str, Any]] = [
        {"documents": [documents[i] for i in one], "question": f"Question {n}?", "mode": mode}
        for n, one in enumerate(sets)
    ]
    if mode == "run_batch":
        return ask.run_batch(items, backend=backend, temperature=0.0)
    bound = [ask.bind(**item) for item in items]
    return [program.run(backend=backend, temperature=0.0) for program in bound]


def orders_of(states: Sequence[sgl.ProgramState], sets: Sequence[Sequence[int]]) -> list[list[int]]:
    """The documents' numbers as each prompt has them."""
    orders = []
    for state, one in zip(states, sets, strict=True):
        made = state.orders()
        orders.append([one[i] for i in made[0].order] if made else list(one))
    return orders


def local_search(
    sets: Sequence[Sequence[int]], weights: dict[int, int], rng: random.Random
) -> list[list[int]]:
    """Orders that no change of one request's order improves, the best of several starts."""
    starts = [plan(sets, weights), by_frequency(sets, weights)]
    while len(starts) < NUM_STARTS:
        starts.append([rng.sample(list(one), len(one)) for one in sets])
    best: list[list[int]] = []
    best_weight = -1
    for orders in starts:
        weight = -1
        while (now := shared_weight(orders, weights)) > weight:
            weight = now
            for index, one in enumerate(orders):
                others: SharedOrders[int] = SharedOrders()
                for other in (*orders[:index], *orders[index + 1 :]):
                    others.add(other)
                orders[index] = list(others.suggest(one, weights).order)
        if weight > best_weight:
            best, best_weight = orders, weight
    return best


def without_model(documents: Sequence[str], sets: list[list[int]], seed: int) -> list[Arm]:
    """The arms, counted in words."""
    weights = {number: len(text.split()) for number, text in enumerate(documents)}
    tokens = sum(weights[number] for one in sets for number in one)

    def arm(name: str, orders: Sequence[Sequence[int]]) -> Arm:
        return Arm(name, tokens, shared_weight(orders, weights))

    arms = [
        arm(mode, orders_of(run_arm(mode, Silent(), documents, sets), sets))
        for mode in ("given", "one by one", "run_batch", "seed")
    ]
    return [*arms, arm("local search", local_search(sets, weights, random.Random(seed)))]


def on_server(
    connect: Callable[[str], Backend], documents: Sequence[str], sets: list[list[int]]
) -> list[Arm]:
    """The arms on a server, each with its own salt, which `connect` takes."""
    arms = []
    for mode in ("given", "one by one", "run_batch", "seed"):
        backend = connect(f"segments-{uuid.uuid4().hex}")
        begin = time.perf_counter()
        states = run_arm(mode, backend, documents, sets)
        elapsed_s = time.perf_counter() - begin
        usage = sum((state.usage for state in states), Usage())
        if usage.cached_prompt_tokens is None:
            raise ValueError("the server needs --plugin sgl_vllm or --enable-prompt-tokens-details")
        arms.append(Arm(mode, usage.prompt_tokens, usage.cached_prompt_tokens, elapsed_s))
    return arms


def table(arms: Sequence[Arm]) -> str:
    lines = [f"{'order':<14}{'tokens':>10}{'shared':>10}{'share':>8}{'time':>9}"]
    for arm in arms:
        took = "" if arm.elapsed_s is None else f"{arm.elapsed_s:.1f} s"
        lines.append(
            f"{arm.name:<14}{arm.tokens:>10,}{arm.shared_tokens:>10,}{arm.share:>8.1%}{took:>9}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.segments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--top", type=int, default=5, help="documents per request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server, which runs the requests")
    parser.add_argument("--api-key", help="of that server")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args(arguments)
    if not 0 < given.top <= given.documents:
        parser.error("--top has to be at least 1 and at most --documents")
    rng = random.Random(given.seed)
    documents = documents_of(given.documents, rng)
    sets = draw(given.requests, given.documents, given.top, rng)
    if given.url:
        arms = on_server(
            lambda salt: sgl.VLLM(given.url, api_key=given.api_key, cache_salt=salt),
            documents,
            sets,
        )
    else:
        arms = without_model(documents, sets, given.seed)
    print(table(arms))
    if given.json:
        asked = {name: getattr(given, name) for name in ("requests", "documents", "top", "seed")}
        document = {**asked, "url": given.url, "arms": [asdict(arm) for arm in arms]}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
