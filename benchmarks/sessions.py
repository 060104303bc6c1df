"""How well the model of agent sessions fits what is published about real ones.

    python -m benchmarks.sessions
    python -m benchmarks.sessions --sessions 5000 --json fit.json --plot fit.svg

Owns the published figures, the comparison with as many sampled sessions, its table and its picture.
The model is `session_model`'s. The figures are TraceLab's, of 4,265 sessions of two coding agents
(arXiv 2606.30560, and the tables on tracelab.cs.washington.edu), but for the share of sessions with
subagents, which is quoted in vLLM's pull request 57103.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from benchmarks.drawing import STYLE
from benchmarks.session_model import Floats, Session, draw_session
from benchmarks.simulate_plot import check as check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT_SESSIONS = 2000
LEAST_SESSIONS = 100  # with fewer, a quantity may have no value

REQUESTS = "user requests of a session"
TOOL_STEPS = "steps after a tool, of a session"
COMPACTIONS = "compactions of a session that has any"
HAS_COMPACTION = "sessions with a compaction"
HAS_SUBAGENT = "sessions with a subagent"
IN_LOOP = "compactions amid a tool loop"
PREFIX = "tokens that continue the step before, agent {}"
APPENDED = "tokens appended to them, agent {}"
OUTPUT = "tokens of output, agent {}"
ALL_OUTPUT = "tokens of output"
FRESH = "tokens from users and tools"
LATENCY = "latency of a tool, s"
TOOLS = "tools run before a step"
HUMAN_WAIT = "wait for a person, s"
HUMAN_WAIT_OF = "wait for a person, s, agent {}"

# A statistic is "mean", a percentile such as "p50", or "< x", the share of values below x.
# The means of output and of what users and tools give are published totals over 357,161 steps.
PUBLISHED: dict[str, dict[str, float]] = {
    REQUESTS: {"mean": 9.2, "< 2": 0.585, "p90": 18, "p99": 137},
    TOOL_STEPS: {"mean": 73.6, "p25": 4, "p50": 15, "p90": 135, "p99": 1107},
    PREFIX.format("A"): {"p50": 126_000, "p99": 918_000},
    PREFIX.format("B"): {"p50": 116_000, "p99": 231_000},
    APPENDED.format("A"): {"p50": 857},
    APPENDED.format("B"): {"p50": 886},
    OUTPUT.format("A"): {"p50": 252},
    OUTPUT.format("B"): {"p50": 184},
    ALL_OUTPUT: {"mean": 523},
    FRESH: {"mean": 1204},
    TOOLS: {"mean": 1.21, "p50": 1, "p90": 2, "p99": 4},
    LATENCY: {"p50": 0.3, "p90": 13.6},
    HUMAN_WAIT: {"p50": 86, "p90": 1260, "p99": 50_400},
    HUMAN_WAIT_OF.format("A"): {"< 300": 0.796},
    HUMAN_WAIT_OF.format("B"): {"< 300": 0.698},
    HAS_COMPACTION: {"mean": 0.097},
    COMPACTIONS: {"mean": 3.7},
    IN_LOOP: {"mean": 0.865},
    HAS_SUBAGENT: {"mean": 0.44},
}

PICTURES = (REQUESTS, TOOL_STEPS, PREFIX, APPENDED, OUTPUT, LATENCY, HUMAN_WAIT)
WIDTH_IN, HEIGHT_IN = 2.9, 2.4  # of one small picture
COLOURS = {"A": "#0072B2", "B": "#E69F00", "": "#333333"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A statistic of a quantity, as published and in the sample."""

    quantity: str
    statistic: str
    published: float
    sampled: float

    @property
    def ratio(self) -> float:
        return self.sampled / self.published


def sample(sessions: Sequence[Session]) -> dict[str, Floats]:
    """Of each quantity, the values in these sessions."""
    values: dict[str, list[float]] = {name: [] for name in PUBLISHED}
    for session in sessions:
        _add_session(session, values)
    return {name: np.array(some, dtype=float) for name, some in values.items()}


def _add_session(session: Session, values: dict[str, list[float]]) -> None:
    name, steps = session.agent.name, session.steps
    of_subagents: set[int] = set()
    for index, step in enumerate(steps):
        if step.trigger == "subagent" or step.continues in of_subagents:
            of_subagents.add(index)
        values[OUTPUT.format(name)].append(step.num_output)
        values[ALL_OUTPUT].append(step.num_output)
        values[TOOLS].append(len(step.pauses_s) if step.trigger == "tool" else 0)
        if step.continues is not None:
            prefix = steps[step.continues].num_prompt
            values[PREFIX.format(name)].append(prefix)
            values[APPENDED.format(name)].append(step.num_prompt - prefix)
        if step.trigger in ("user", "tool"):
            values[FRESH].append(step.num_new)
        if step.trigger == "tool":
            values[LATENCY] += step.pauses_s
        elif step.trigger == "user":
            values[HUMAN_WAIT] += step.pauses_s
            values[HUMAN_WAIT_OF.format(name)] += step.pauses_s
    triggers = [step.trigger for step in steps]
    own_triggers = [step.trigger for i, step in enumerate(steps) if i not in of_subagents]
    values[REQUESTS].append(triggers.count("user"))
    values[TOOL_STEPS].append(own_triggers.count("tool"))
    values[HAS_SUBAGENT].append("subagent" in triggers)
    values[HAS_COMPACTION].append("compaction" in triggers)
    if "compaction" in triggers:
        values[COMPACTIONS].append(triggers.count("compaction"))
    values[IN_LOOP] += [
        following == "tool"
        for one, following in itertools.pairwise(triggers)
        if one == "compaction"
    ]


def statistic(values: Floats, name: str) -> float:
    """A statistic by its name in `PUBLISHED`."""
    if name == "mean":
        return float(values.mean())
    if name.startswith("<"):
        return float((values < float(name[1:])).mean())
    return float(np.quantile(values, float(name.removeprefix("p")) / 100))


def compare(values: Mapping[str, Floats]) -> list[Figure]:
    return [
        Figure(quantity, name, published, statistic(values[quantity], name))
        for quantity, statistics in PUBLISHED.items()
        for name, published in statistics.items()
    ]


def table(figures: Sequence[Figure]) -> str:
    lines = [f"{'':44}{'':>7}{'published':>12}{'sampled':>12}{'ratio':>8}"]
    before = None
    for one in figures:
        quantity = "" if one.quantity == before else one.quantity
        before = one.quantity
        lines.append(
            f"{quantity:44}{one.statistic:>7}{one.published:>12,.5g}{one.sampled:>12,.5g}"
            f"{one.ratio:>8.2f}"
        )
    return "\n".join(lines)


def draw(values: Mapping[str, Floats], file: Path) -> None:
    """The sampled distributions, and the published quantiles as points on or beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(
            2, 4, sharey=True, figsize=(4 * WIDTH_IN, 2 * HEIGHT_IN), layout="constrained"
        )
        for axes, name in zip(all_axes.flat, PICTURES, strict=False):
            for agent in ("A", "B") if "{}" in name else ("",):
                _draw_distribution(axes, values, name.format(agent), agent)
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_xlabel(name.removesuffix(", agent {}"))
        for axes in all_axes[:, 0]:
            axes.set_ylabel("share that is at most this")
        rest = all_axes.flat[len(PICTURES)]
        rest.axis("off")
        handles = [
            *(
                rest.plot([], [], color=COLOURS[agent], label=label)[0]
                for agent, label in (("A", "sampled, agent A"), ("B", "agent B"), ("", "both"))
            ),
            rest.plot([], [], color="#333333", marker="o", linestyle="", label="published")[0],
        ]
        rest.legend(handles=handles, loc="center left", frameon=False)
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, dpi=120, facecolor="white", metadata=metadata)
        pyplot.close(figure)


def _draw_distribution(axes: Axes, values: Mapping[str, Floats], name: str, agent: str) -> None:
    shares = np.concatenate([np.linspace(0.01, 0.99, 99), np.linspace(0.991, 0.999, 9)])
    levels = np.quantile(values[name], shares)
    shown = levels > 0
    axes.plot(levels[shown], shares[shown], color=COLOURS[agent], linewidth=1.4)
    points = [
        (float(key[1:]) - 1, value) if key.startswith("<") else (value, float(key[1:]) / 100)
        for key, value in PUBLISHED[name].items()
        if key != "mean"
    ]
    axes.plot(*zip(*points, strict=True), color=COLOURS[agent], marker="o", linestyle="")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--sessions",
        type=int,
        default=DEFAULT_SESSIONS,
        metavar="N",
        help=f"how many to sample (default: {DEFAULT_SESSIONS})",
    )
    add("--seed", type=int, default=0, help="default: 0")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--plot", type=Path, metavar="FILE", help="draw the distributions (.png or .svg)")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.sessions < LEAST_SESSIONS:
        parser.error(f"--sessions is {LEAST_SESSIONS} or more")
    try:
        if arguments.plot is not None:
            check_plot(arguments.plot)
        rng = np.random.default_rng(arguments.seed)
        bar = tqdm(range(arguments.sessions), unit="session", delay=2, leave=False, disable=None)
        values = sample([draw_session(rng) for _ in bar])
        figures = compare(values)
        print(f"{arguments.sessions:,} sessions, {len(values[ALL_OUTPUT]):,} steps\n")
        print(table(figures))
        if arguments.json is not None:
            document = {
                "sessions": arguments.sessions,
                "seed": arguments.seed,
                "figures": [asdict(one) for one in figures],
            }
            arguments.json.write_text(json.dumps(document, indent=2) + "\n")
        if arguments.plot is not None:
            draw(values, arguments.plot)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
