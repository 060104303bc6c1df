"""`python -m benchmarks.jump_groups`: which jumps pay, and does it pay to let one wait for another?

A pass in which every request decodes one token runs in full CUDA graphs. A pass in which a request
computes several tokens does not, for the whole batch. So a short run may be better decoded. And if
a jump waits one step for the jump of another request, two passes of this kind can become one, but
the request that waits is a step later.

Owns a model of the steps of a full batch, and the two tables that it gives. Nothing runs on a GPU:
what such a pass costs more is the unknown of the tables (on an H200, with 7 billion weights and 16
requests at a time: 1.1).

    a pass in which all decode                         costs 1
    a pass with a jump, or with a new request's prompt costs 1 + penalty

The answers were recorded on the demo model, 24 of each format. A batch stays full: a request that
has ended is followed by the next. A jump waits only if no other request leaves full CUDA graphs in
the step, and only one step. With a step in flight, a jump wastes the row that is in flight, and a
request can jump again one step later.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Answer = Sequence[int]
"""The runs of an answer in order: how many tokens the model chose or, if negative, were forced."""

RECORDED = Path(__file__).parent / "jump_groups.json"
PENALTIES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
BATCHES = (2, 8, 32)
LEAST_RUNS = (1, 2, 3, 4)
NO_JUMPS = 1 << 30
NUM_ANSWERS = 960


@dataclass(slots=True)
class Outcome:
    """What a run of the model has counted: steps, those outside full CUDA graphs, and for each
    request the steps from its first to its last."""

    steps: int = 0
    mixed_steps: int = 0
    waits: int = 0
    steps_of_requests: list[int] = field(default_factory=list)

    def cost(self, penalty: float) -> float:
        """The time of all steps, in passes in which all decode."""
        return self.steps + penalty * self.mixed_steps


@dataclass(slots=True)
class _Row:
    passes: list[bool]
    """Those to come, in reverse, each with whether it leaves full CUDA graphs."""
    num_steps: int = 0
    has_waited: bool = False


def passes_of(answer: Answer, *, has_step_in_flight: bool) -> list[bool]:
    """The passes of one request, each with whether it leaves full CUDA graphs.

    The first computes the prompt and what is forced at the start. Each samples a token; the pass
    after a forced run samples the first token after it.
    """
    passes: list[bool] = []
    next_is_mixed = True
    for index, run in enumerate(answer):
        if run > 0:
            passes += [next_is_mixed] + [False] * (run - 1)
            next_is_mixed = False
        elif index and index + 1 < len(answer):
            passes += [False] * has_step_in_flight  # its sample is stale
            next_is_mixed = True
    return passes or [True]


def simulate(
    answers: Sequence[Answer], at_once: int, *, waits: bool, has_step_in_flight: bool
) -> Outcome:
    """Run a batch of `at_once` requests until all answers are given."""
    found = Outcome()
    todo = iter(answers)
    batch = [_row(one, has_step_in_flight) for one in itertools.islice(todo, at_once)]
    while batch:
        leaving = [row for row in batch if row.passes[-1]]
        alone = leaving[0] if waits and len(leaving) == 1 and len(batch) > 1 else None
        if alone is not None and (alone.has_waited or not alone.num_steps):
            alone = None  # it has waited already, or it is new
        found.steps += 1
        found.mixed_steps += bool(leaving) and alone is None
        found.waits += alone is not None
        for row in batch:
            row.num_steps += 1
            row.has_waited = row is alone
            if row is not alone:
                row.passes.pop()
        found.steps_of_requests += [row.num_steps for row in batch if not row.passes]
        ended = sum(not row.passes for row in batch)
        batch = [row for row in batch if row.passes]
        batch += [_row(one, has_step_in_flight) for one in itertools.islice(todo, ended)]
    return found


def _row(answer: Answer, has_step_in_flight: bool) -> _Row:
    return _Row(passes_of(answer, has_step_in_flight=has_step_in_flight)[::-1])


def decoded(answer: Answer, least_run: int) -> Answer:
    """The answer with its forced runs decoded, but for those of `least_run` tokens or more, and the
    one at its start, which the prompt's pass computes."""
    runs: list[int] = []
    for index, run in enumerate(answer):
        is_chosen = run > 0 or (index > 0 and -run < least_run)
        if is_chosen and runs and runs[-1] > 0:
            runs[-1] += abs(run)
        else:
            runs.append(abs(run) if is_chosen else run)
    return runs


def recorded() -> dict[str, list[Answer]]:
    """As many answers of each format as the model runs."""
    formats: dict[str, list[Answer]] = json.loads(RECORDED.read_text())
    return {
        name: list(itertools.islice(itertools.cycle(answers), NUM_ANSWERS))
        for name, answers in formats.items()
    }


def table_of_least_runs() -> Iterator[str]:
    """Rows of Markdown: the time with jumps over runs of a least length, asynchronously, in percent
    of the time without jumps."""
    heads = " | ".join(f"penalty {penalty:g}" for penalty in PENALTIES)
    yield f"| format | at once | least run | {heads} |"
    yield "|---|---|---|" + "---|" * len(PENALTIES)
    for (name, answers), at_once in itertools.product(recorded().items(), BATCHES):
        without, *found = (
            simulate(
                [decoded(one, least_run) for one in answers],
                at_once,
                waits=False,
                has_step_in_flight=True,
            )
            for least_run in (NO_JUMPS, *LEAST_RUNS)
        )
        for least_run, outcome in zip(LEAST_RUNS, found, strict=True):
            ratios = (outcome.cost(penalty) / without.cost(penalty) for penalty in PENALTIES)
            cells = " | ".join(f"{100 * ratio:.0f} %" for ratio in ratios)
            yield f"| {name} | {at_once} | {least_run} | {cells} |"


def table() -> Iterator[str]:
    """Rows of Markdown: the time with waiting, in percent of the time without."""
    heads = " | ".join(f"penalty {penalty:g}" for penalty in PENALTIES)
    yield f"| format | at once | steps | mixed steps | waits | {heads} |"
    yield "|---|---|---|---|---|" + "---|" * len(PENALTIES)
    for (name, answers), at_once, in_flight in itertools.product(
        recorded().items(), BATCHES, (False, True)
    ):
        without, waiting = (
            simulate(answers, at_once, waits=waits, has_step_in_flight=in_flight)
            for waits in (False, True)
        )
        ratios = (waiting.cost(penalty) / without.cost(penalty) for penalty in PENALTIES)
        cells = " | ".join(f"{100 * ratio:.1f} %" for ratio in ratios)
        yield (
            f"| {name}{', asynchronous' if in_flight else ''} | {at_once} "
            f"| {without.steps} → {waiting.steps} | {without.mixed_steps} → {waiting.mixed_steps} "
            f"| {waiting.waits} | {cells} |"
        )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.jump_groups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("Jumps over runs of a least length: time in percent of that without jumps\n")
    print("\n".join(table_of_least_runs()))
    print("\nJumps that wait for another request's: time in percent of that without waiting\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
