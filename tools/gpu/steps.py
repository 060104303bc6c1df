"""The steps of the suite, the most worth knowing first, and what each runs.

Standard library only, as it runs before anything is there.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any  # Any: JSON

from tests.gpu.configuration import (
    CONFIGURATION_VARIABLE,
    UNVERIFIED_VARIABLE,
    Configuration,
    all_configurations,
)

WORKLOADS = ("json_regex", "mmlu", "no_sharing", "json_schema", "tight_cache", "chat_short",
             "tree_of_thought")  # fmt: skip
"""Of the comparison, in the order of worth; `mmlu` is the one that asks by `select`."""
MODELS = {"7b": "shape:qwen2.5-7b", "0.5b": "shape:qwen2.5-0.5b"}
PROGRAMS = {16: 64, 1: 16, 128: 384}
"""By concurrency, in the order of worth: so many programs a round."""
ROUNDS = 3
SERVER_ARGS = "--server-args=--gpu-memory-utilization 0.42"
"""Both servers stay up, and one of them at a time has work."""
PACE_WORKLOADS = ("json_regex", "json_schema", "no_sharing")


def read_json(file: Path) -> Any:
    """Its content; None if there is no such file, or one that was not written to its end."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True)
class Step:
    """One process. `arguments` are Python's; `{out}` in them stands for the step's folder, `{todo}`
    for those of its `parts` that have no PART.json there yet."""

    name: str
    shows: str
    limit_s: int
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    is_timed: bool = False
    """It measures time, so nothing else may use the GPU."""

    def todo(self, out: Path) -> list[str]:
        """The parts that have no result in the step's folder."""
        return [part for part in self.parts if read_json(out / f"{part}.json") is None]

    def command(self, python: str, out: Path) -> list[str]:
        """What is to be run for the results in the step's folder."""
        command = [python]
        for argument in self.arguments:
            if argument == "{todo}":
                command += self.todo(out)
            else:
                command.append(argument.replace("{out}", str(out)))
        return command


def all_steps() -> list[Step]:
    """In the order of worth."""
    first, *others = all_configurations()
    synchronous = Configuration(runner="v1", scheduling="sync")
    others.remove(synchronous)
    plain = Configuration(numerics="plain")
    exact = Configuration(backend="triton", numerics="float32")
    small = "answers are stock's, in a small cache"
    answers = tests("same_answers", "answers are stock's, as by default", 420, first, only="roomy")
    streaming = tests("streaming", "streams, and clients that leave, on a server", 300, first)
    blocks = "copies inside a block, on every layout of the cache"
    return [
        Step("doctor", "what is installed, and which parts are on", 120, DOCTOR),
        tests("kernels", "the kernels against their references", 540),
        answers,
        tests("same_answers", small, 420, first, only="tight"),
        tests("partial_blocks", blocks, 420, first),
        tests("partial_blocks", f"{blocks}, in float32", 420, exact),
        tests("same_answers", "answers are stock's, in float32", 420, exact, only="roomy"),
        tests("same_answers", f"{small}, in float32", 420, exact, only="tight"),
        tests("same_answers", "answers are stock's, synchronously", 420, synchronous, only="roomy"),
        tests("same_answers", small, 420, synchronous, only="tight"),
        tests("approximate_reuse", "moved segments have the KV of their new place", 300, first),
        tests("approximate_reuse", "the same, in float32", 300, exact),
        tests(
            "step_time", "no loss of overlap: at most 1.01 of stock's step", 420, plain, timed=True
        ),
        Step("kernel-times", "the kernels against vLLM's own", 540, KERNEL_TIMES, is_timed=True),
        tests("prefix_backend", "prefix-grouped decode in an engine", 420, plain),
        Step("models", "made-up weights in the 7B shape, for the next steps", 420, MAKE_MODEL),
        *paces(),
        comparison("7b", 16),
        with_unverified(answers),
        with_unverified(comparison("7b", 16)),
        streaming,
        with_unverified(streaming),
        tests("same_answers", "as served: near ties alone differ", 540, plain, only="roomy"),
        tests("same_answers", "as served, in a small cache", 540, plain, only="tight"),
        comparison("0.5b", 16),
        with_unverified(comparison("0.5b", 16)),
        *(tests("same_answers", small, 300, other, only="tight") for other in others),
        tests("partial_blocks", blocks, 420, Configuration(backend="triton")),
        *(comparison(model, count) for count in PROGRAMS if count != 16 for model in MODELS),
    ]


DOCTOR = ("-m", "sgl_vllm.commands.cli", "doctor")
KERNEL_TIMES = ("-m", "benchmarks.kernels", "--json", "{out}/kernels.json")
MAKE_MODEL = ("-m", "benchmarks.models", MODELS["7b"])


def tests(
    name: str,
    shows: str,
    limit_s: int,
    configuration: Configuration | None = None,
    *,
    only: str = "",
    timed: bool = False,
) -> Step:
    """A file of tests/gpu, or those of its tests whose names contain `only`, in a process and a
    configuration of its own."""
    called, environment = name.replace("_", "-"), {}
    if configuration is not None:
        called += f"-{configuration}"
        environment = {CONFIGURATION_VARIABLE: str(configuration)}
    pytest = ["-m", "pytest", f"tests/gpu/test_{name}.py", "--junitxml={out}/junit.xml"]
    if only:
        called += f"-{only.strip('-')}"
        pytest.append(f"-k{only}")
    return Step(called, shows, limit_s, tuple(pytest), environment, is_timed=timed)


def comparison(
    model: str,
    concurrency: int,
    workloads: Sequence[str] = WORKLOADS,
    called: str = "",
    plugin_config: Sequence[str] = (),
    server_flags: str = "",
) -> Step:
    """Stock and plugin in alternating rounds on real servers. `called` is what the step's name ends
    with, and `plugin_config` what its plugin has of options."""
    flags = f"--model {MODELS[model]} --concurrency {concurrency} --rounds {ROUNDS}"
    flags += f" --requests {PROGRAMS[concurrency]} --servers-at-once 2 --json {{out}}"
    options = ["--plugin-config", *plugin_config] if plugin_config else []
    return Step(
        f"ab-{model}-c{concurrency}{called}",
        f"the plugin against stock, {concurrency} programs at a time",
        1800,
        ("-m", "benchmarks.ab", "{todo}", *flags.split(), *options, SERVER_ARGS + server_flags),
        parts=tuple(workloads),
        is_timed=True,
    )


def paces() -> Iterable[Step]:
    """What a jump costs by the CUDA graphs that its pass runs in: with full graphs for rows of
    several tokens, without them, and with full graphs for every pass. With the seconds of each part
    of a step, and the passes by graph."""
    for called, plugin_config, server_flags in (
        ("-pace", (), ""),
        ("-pace-no-jump-graphs", ("jump_graph_tokens=0",), ""),
        ("-pace-full", (), " --compilation-config.cudagraph_mode=FULL"),
    ):
        server_flags += " --cudagraph-metrics"
        step = comparison("7b", 16, PACE_WORKLOADS, called, plugin_config, server_flags)
        yield replace(step, limit_s=180)


def with_unverified(step: Step) -> Step:
    """The same, with every part on, whatever its self-check would find."""
    return replace(
        step,
        name=f"{step.name}-unverified",
        shows=f"{step.shows}; without the self-check",
        environment={**step.environment, UNVERIFIED_VARIABLE: "1"},
    )


def ready(steps: Iterable[Step], unverified: str) -> list[Step]:
    """Servers are told of the unverified options (JSON) as well; without any, their steps go."""
    made = []
    for step in steps:
        if UNVERIFIED_VARIABLE not in step.environment:
            made.append(step)
        elif json.loads(unverified):
            environment = {**step.environment, "SGL_VLLM_CONFIG": unverified}
            made.append(replace(step, environment=environment))
        else:
            print(f"{step.name}: nothing is unverified", flush=True)
    return made


def chosen(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    """Those that a pattern names, in the order of the patterns; all if there is none.

    Raises:
        ValueError: a pattern names none.
    """
    found = {} if patterns else {step.name: step for step in steps}
    for pattern in patterns:
        named = {one.name: one for one in steps if fnmatch.fnmatchcase(one.name, pattern)}
        if not named:
            raise ValueError(f"there is no step {pattern!r}: --list shows them")
        found |= {name: one for name, one in named.items() if name not in found}
    return [*found.values()]
