"""Results of `benchmarks.ab` as their files have them.

Owns the reading of the JSON, what a spread says of a ratio, and the names that tell results apart.
Pure but for reading files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.ab.workloads import WORKLOADS
from benchmarks.arms import ARMS

MANY_MORE_TOKENS = 0.1
"""Arms whose prompts differ by more than this share ask in different ways."""


class ReportError(ValueError):
    """The report cannot be made; the message is one line for people."""


class Verdict(StrEnum):
    """What a ratio, with the spread of its rounds, allows to say of the plugin."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference"
    UNKNOWN = "one round"


@dataclass(frozen=True)
class Spread:
    """A ratio of medians, and the ratios of single rounds; above 1 is better for the plugin.

    `low` and `high` are the least and the greatest of the rounds, None if there were not two.
    """

    ratio: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, ratio: float, rounds: Sequence[float]) -> Spread:
        return cls(ratio, min(rounds), max(rounds)) if len(rounds) > 1 else cls(ratio)

    @property
    def verdict(self) -> Verdict:
        """No difference, if rounds fell on both sides of 1 or were as far apart as the ratio is
        from 1."""
        if self.low is None or self.high is None:
            return Verdict.UNKNOWN
        apart = math.log(self.high / self.low)
        if self.low <= 1 <= self.high or abs(math.log(self.ratio)) <= apart:
            return Verdict.NO_DIFFERENCE
        return Verdict.BETTER if self.ratio > 1 else Verdict.WORSE


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        variant: what tells it from the report's other results, "" if its workload does.
        arms: medians by the names of `benchmarks.ab.result.Figures`, by arm.
        spreads: by the names of the JSON's "ratio"; "throughput" is always there.
        unique_prompt_tokens: what any server must compute.
        score: by arm; an arm that has none is not there.
        num_rounds: of each arm; 0 if the file does not say.
        quick: whether it was a look and no measurement.
    """

    file: Path
    workload: str
    model: str
    variant: str
    requests: int
    num_rounds: int
    quick: bool
    concurrency: int | None
    arms: Mapping[str, Mapping[str, float]]
    spreads: Mapping[str, Spread]
    same_equal: int
    same_compared: int
    unique_prompt_tokens: int
    score: Mapping[str, float]
    switched: tuple[str, ...]
    server_args: tuple[str, ...]
    machine: str
    date: str
    versions: Mapping[str, str]

    @property
    def label(self) -> str:
        return f"{self.workload}, {self.variant}" if self.variant else self.workload

    @property
    def throughput(self) -> Spread:
        return self.spreads["throughput"]

    @property
    def different_prompts(self) -> bool:
        """Whether the arms send prompts of such different lengths that hit rates say little."""
        stock, sgl = (self.arms[arm].get("prompt_tokens") or 0 for arm in ARMS)
        return min(stock, sgl) > 0 and abs(sgl / stock - 1) > MANY_MORE_TOKENS


@dataclass(frozen=True)
class Results:
    """Everything that a report is made of.

    `results` are in the order in which they are shown: workloads with the greatest gains first.
    `skipped` are the JSON files in named folders that are something else.
    """

    results: tuple[Result, ...]
    skipped: tuple[Path, ...]

    def values(self, name: str) -> tuple[str, ...]:
        """The different values of a result's text, in order, without empty ones."""
        found = (str(getattr(one, name)) for one in self.results)
        return tuple(dict.fromkeys(value for value in found if value))

    def versions(self) -> tuple[str, ...]:
        named = (
            f"{name} {number}" for one in self.results for name, number in one.versions.items()
        )
        return tuple(dict.fromkeys(named))


# -- reading


def load(places: Iterable[Path]) -> Results:
    """The results in files, and in all `*.json` of folders. ReportError if one cannot be read,
    lacks what matters, or there is none."""
    results: list[Result] = []
    skipped: list[Path] = []
    for place in dict.fromkeys(places):
        in_folder = place.is_dir()
        for file in sorted(place.glob("*.json")) if in_folder else [place]:
            content = _content_of(file)
            try:
                if "workload" in content and "arms" in content:
                    results.append(_result(content, file))
                elif in_folder:
                    skipped.append(file)
                else:
                    raise ReportError(f"{file} is no result of benchmarks.ab")
            except (KeyError, TypeError, AttributeError) as error:
                raise ReportError(f"{file} is no result of benchmarks.ab: {error!r}") from error
    if not results:
        raise ReportError(f"no result of benchmarks.ab in {', '.join(map(str, places))}")
    return Results(tuple(_named(_in_order(results))), tuple(skipped))


def _content_of(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:  # no JSON, or no text
        raise ReportError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{file} is no result of benchmarks.ab: its JSON is no object")
    return content


def _result(content: dict[str, Any], file: Path) -> Result:
    arguments, workload, same = content["arguments"], content["workload"], content["same_output"]
    arms = {arm: content["arms"][arm] for arm in ARMS}
    switched = [f"without {part}" for part in arguments.get("off") or []]
    switched += [arguments["policy"]] if arguments.get("policy") else []
    if stock_args := arguments.get("stock_args"):
        switched.append(f"stock with {stock_args}")
    switched += arguments.get("plugin_config") or []
    spreads = _spreads(content)
    _ = spreads["throughput"]
    usual = WORKLOADS.get(workload)
    return Result(
        file=file,
        workload=workload,
        model=_model(content),
        variant="",
        requests=content["requests"],
        num_rounds=min(len(arm["rounds"]) for arm in arms.values()),
        quick=bool(arguments.get("quick")),
        concurrency=arguments.get("concurrency") or (usual.concurrency if usual else None),
        arms={name: _numbers(arm) for name, arm in arms.items()},
        spreads=spreads,
        same_equal=same["equal"],
        same_compared=same["compared"],
        unique_prompt_tokens=content["limits"]["unique_prompt_tokens"],
        score=_numbers(content["score"]),
        switched=tuple(switched),
        server_args=tuple(content["server_args"]),
        machine=_in_words(**content["machine"]),
        date=content["date"],
        versions=content["versions"],
    )


def _model(content: Mapping[str, Any]) -> str:
    """Of a folder only its name: where it lies says nothing to others."""
    model: str = content["model"]
    return Path(model).name if Path(model).is_absolute() else model


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    """All that are finite numbers, by their names."""
    return {
        key: value
        for key, value in content.items()
        if type(value) in (int, float) and math.isfinite(value)
    }


def _spreads(content: Mapping[str, Any]) -> dict[str, Spread]:
    ratios = _numbers(content["ratio"])
    if wrong := [name for name, value in ratios.items() if value <= 0]:
        raise TypeError(f"ratio.{wrong[0]} is not above 0")
    rounds = [_numbers(one) for one in content["ratio_of_rounds"]]
    return {
        name: Spread.of(value, [one[name] for one in rounds if one.get(name, 0) > 0])
        for name, value in ratios.items()
    }


def _in_words(cores: int, processor: str, accelerator: str | None) -> str:
    words = f"{cores} {'core' if cores == 1 else 'cores'} of {processor}"
    return f"{words} and {accelerator}" if accelerator else words


# -- telling apart


def _in_order(results: Sequence[Result]) -> list[Result]:
    best: dict[str, float] = {}
    for one in results:
        best[one.workload] = max(best.get(one.workload, 0), one.throughput.ratio)
    return sorted(
        results,
        key=lambda one: (
            -best[one.workload],
            one.workload,
            one.model,
            one.concurrency or 0,
            one.switched,
            str(one.file),
        ),
    )


def _named(results: Sequence[Result]) -> list[Result]:
    """With variants: the model if there are several, concurrency, server flags, programs and file
    as needed, and always what makes it no plain measurement."""
    several_models = len({one.model for one in results}) > 1
    concurrencies = {
        workload: {one.concurrency for one in results if one.workload == workload}
        for workload in {one.workload for one in results}
    }
    named = []
    for one in results:
        words = [one.model] if several_models else []
        if len(concurrencies[one.workload]) > 1 and one.concurrency:
            words.append(f"{one.concurrency} at a time")
        words += [*one.switched, *(["quick"] if one.quick else [])]
        named.append(replace(one, variant=", ".join(words)))
    named = _told_apart(named, lambda one: " ".join(one.server_args))
    named = _told_apart(named, lambda one: f"{one.requests} programs")
    return _told_apart(named, lambda one: one.file.stem)


def _told_apart(results: Sequence[Result], by: Callable[[Result], str]) -> list[Result]:
    """Those of the same label get a further word where it is not the same for all of them."""
    words: dict[str, set[str]] = {}
    for one in results:
        words.setdefault(one.label, set()).add(by(one))
    return [
        replace(one, variant=", ".join(filter(None, [one.variant, by(one)])))
        if len(words[one.label]) > 1
        else one
        for one in results
    ]
