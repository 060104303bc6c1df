"""Which tokens may come next: vLLM's structured-output backends and the plugin's, in one run.

    python -m benchmarks.masks                                # 40 made-up schemas, all backends
    python -m benchmarks.masks --data DIR --json masks.json   # MaskBench's: maskbench_dev.jsonl.gz
    python -m benchmarks.masks --data DIR --backends xgrammar,sgl --every 10 --details
    python -m benchmarks.masks --tokenizer FOLDER             # with a model's own vocabulary
    python -m benchmarks.masks --suite SUITE.tar.gz     # the JSON-Schema-Test-Suite, by keyword

All are asked through vLLM's interface, in the order in which vLLM asks: a schema is compiled, and
an instance goes in token by token, a row of the bit mask filled before each token and once more
before the end of the sequence. The mask decides, as it does for the sampler. A schema is *right*
when it compiles, every valid instance comes through to its end, and every invalid one is stopped
somewhere. One without instances is right when it compiles.

- *compile* is the first time a schema is met, *compile again* what a later request with the same
  schema waits for, *mask* one `fill_bitmask` of one row, *accept* one `accept_tokens` of one token.
  xgrammar compiles with up to 8 threads, the others with one.
- What is refused has no compile time; so has what outlines compiles for more than 5 s, as vLLM then
  refuses it. What is given up (--schema-limit) counts with the limit.
- *Set-up* is the vocabulary's preprocessing and one trivial schema; *memory* is the process's
  growth from before the set-up to its peak. Backends run one after the other, each alone.
- outlines takes seconds per schema: it gets evenly chosen ones (--outlines-limit), and "best"
  compares backends that had the same schemas.
- `sgl` reads schemas as the specification does. `sgl-stock` reads them as xgrammar does, which is a
  server's default; it runs only where it is named.
- *Mask and accept disagree*: a token that the mask allows and `accept_tokens` refuses, or the other
  way round. A backend that has one of these can end requests of real users.

Absolute times mean little on a shared machine: compare within one run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command import positive
from benchmarks.medians import percentile
from benchmarks.models import resolve_model
from benchmarks.schema_suite import load_suite
from benchmarks.schemas import FILE, Schema, schemas

TEKKEN = "tekken_240911.json"
TRIVIAL = Schema("trivial", '{"type": "boolean"}', ())
TRIVIAL_INSTANCE = "true"


@dataclass(frozen=True)
class Source:
    """Where a backend's class is, and the packages that it needs."""

    module: str
    name: str
    packages: tuple[str, ...]
    reading: str | None = None
    """Of schemas: a value of `SchemaSemantics`."""


_VLLM = "vllm.v1.structured_output"
BACKENDS = {
    "xgrammar": Source(f"{_VLLM}.backend_xgrammar", "XgrammarBackend", ("xgrammar",)),
    "guidance": Source(f"{_VLLM}.backend_guidance", "GuidanceBackend", ("llguidance",)),
    "outlines": Source(f"{_VLLM}.backend_outlines", "OutlinesBackend", ("outlines_core",)),
    "sgl": Source("sgl_vllm.fsm.vllm.backend", "SglBackend", ()),
    "sgl-stock": Source("sgl_vllm.fsm.vllm.backend", "SglBackend", (), "strict"),
}
DEFAULT_BACKENDS = [name for name in BACKENDS if name != "sgl-stock"]


# -- what is asked


@dataclass(frozen=True)
class Walk:
    """An instance in tokens, without the end of the sequence."""

    tokens: tuple[int, ...]
    valid: bool


@dataclass(frozen=True)
class Case:
    """A schema and its instances in tokens."""

    name: str
    schema: str
    walks: tuple[Walk, ...]


def cases_of(chosen: Iterable[Schema], encode: Callable[[str], Sequence[int]]) -> list[Case]:
    return [
        Case(
            one.name,
            one.text,
            tuple(Walk(tuple(encode(each.text)), each.valid) for each in one.instances),
        )
        for one in chosen
    ]


def evenly(cases: Sequence[Case], limit: int) -> list[Case]:
    """`limit` of the cases, evenly chosen, or all if there are fewer."""
    count = min(limit, len(cases))
    return [cases[number * len(cases) // count] for number in range(count)]


# -- one schema


@dataclass
class Times:
    """In nanoseconds, one per call."""

    compile: list[int] = field(default_factory=list)
    compile_again: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    accept: list[int] = field(default_factory=list)


@dataclass
class Verdict:
    """What came out for one schema.

    Attributes:
        refused: why it did not compile.
        gave_up: it took longer than the limit, in compiling or with an instance.
        failed: an error after it had compiled.
        valid_refused, invalid_accepted: indices of the instances that went wrong.
        num_valid, num_invalid: instances that were tried.
        disagreements: tokens over which mask and `accept_tokens` disagree.
        compile_us: of the first compilation; None if there was none.
        compiled_to: the class of the grammar. The plugin hands some schemas to other backends.
    """

    name: str
    refused: str | None = None
    gave_up: bool = False
    failed: str | None = None
    valid_refused: list[int] = field(default_factory=list)
    invalid_accepted: list[int] = field(default_factory=list)
    num_valid: int = 0
    num_invalid: int = 0
    disagreements: int = 0
    compile_us: float | None = None
    compiled_to: str | None = None

    @property
    def right(self) -> bool:
        return not (
            self.refused
            or self.gave_up
            or self.failed
            or self.valid_refused
            or self.invalid_accepted
        )

    @property
    def kind(self) -> str:
        """In a word or two; with several things wrong, the first of them."""
        kinds = {
            "refused": self.refused,
            "gave up": self.gave_up,
            "failed": self.failed,
            "valid refused": self.valid_refused,
            "invalid accepted": self.invalid_accepted,
        }
        return next((kind for kind, wrong in kinds.items() if wrong), "right")


class GaveUp(Exception):
    """Something took longer than its limit."""


@dataclass
class Asker:
    """Puts cases to one backend. Only single calls are timed, with `time.perf_counter_ns`.

    Compilation runs in a thread of its own, as in vLLM, so that it can be given up. Such a thread
    goes on, and so does one that the backend itself gave up, as vLLM does for outlines after 5 s.
    The next case waits for them, but not longer than the limit again.
    """

    backend: Any
    eos_token_id: int
    limit_s: float
    times: Times = field(default_factory=Times)
    abandoned: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        self._json = StructuredOutputOptions.JSON
        self._bitmask = self.backend.allocate_token_bitmask(1)
        self._row = self._bitmask.numpy()[0].view(np.uint32)

    def ask(self, case: Case) -> Verdict:
        """Never raises for what the backend does, Rust's panics included."""
        self._wait_for_abandoned()
        verdict = Verdict(case.name)
        deadline_s = time.monotonic() + self.limit_s
        try:
            self._ask(case, verdict, deadline_s)
        except GaveUp:
            verdict.gave_up = True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            verdict.failed = _in_short(error)
        return verdict

    def _wait_for_abandoned(self) -> None:
        deadline_s = time.monotonic() + self.limit_s
        for thread in self.abandoned:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.abandoned = []

    def _ask(self, case: Case, verdict: Verdict, deadline_s: float) -> None:
        try:
            grammar, duration_ns = self._compiled(case.schema, deadline_s)
        except GaveUp:
            self.times.compile.append(round(self.limit_s * 1e9))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            verdict.refused = _in_short(error)
            return
        verdict.refused = _late_error(grammar)
        if verdict.refused:
            return
        self.times.compile.append(duration_ns)
        verdict.compile_us = duration_ns / 1000
        verdict.compiled_to = type(grammar).__name__
        for index, walk in enumerate(case.walks):
            if index:
                grammar, duration_ns = self._compiled(case.schema, deadline_s)
                self.times.compile_again.append(duration_ns)
            accepted = self._comes_through(grammar, walk, verdict, deadline_s)
            if walk.valid:
                verdict.num_valid += 1
            else:
                verdict.num_invalid += 1
            if accepted != walk.valid:
                (verdict.valid_refused if walk.valid else verdict.invalid_accepted).append(index)

    def _compiled(self, schema: str, deadline_s: float) -> tuple[Any, int]:
        """The grammar and the nanoseconds that it took; GaveUp after the deadline."""
        outcome: list[Any] = []
        before = set(threading.enumerate())

        def compile_it() -> None:
            begun_ns = time.perf_counter_ns()
            try:
                grammar = self.backend.compile_grammar(self._json, schema)
                outcome.extend((grammar, time.perf_counter_ns() - begun_ns))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=compile_it, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline_s - time.monotonic()))
        given_up = thread.is_alive()
        if given_up or len(outcome) == 1:
            self.abandoned = [one for one in threading.enumerate() if one not in before]
        if given_up:
            raise GaveUp
        if len(outcome) == 1:
            raise outcome[0]
        grammar, duration_ns = outcome
        return grammar, duration_ns

    def _comes_through(self, grammar: Any, walk: Walk, verdict: Verdict, deadline_s: float) -> bool:
        """Whether the mask allows each token of the instance in its turn, and then the end."""
        row, bitmask, times = self._row, self._bitmask, self.times
        clock = time.perf_counter_ns
        for token in (*walk.tokens, self.eos_token_id):
            begun_ns = clock()
            grammar.fill_bitmask(bitmask, 0)
            times.mask.append(clock() - begun_ns)
            if not int(row[token >> 5]) >> (token & 31) & 1:
                verdict.disagreements += bool(grammar.validate_tokens([token]))
                return False
            tokens = [token]
            begun_ns = clock()
            accepted = grammar.accept_tokens("benchmark", tokens)
            times.accept.append(clock() - begun_ns)
            if not accepted:
                verdict.disagreements += 1
                return False
            if time.monotonic() > deadline_s:
                raise GaveUp
        verdict.disagreements += not grammar.is_terminated()
        return True


def _late_error(grammar: Any) -> str | None:
    """guidance compiles anything, and says afterwards what was wrong with it; vLLM's front end asks
    before it takes the request."""
    matcher = getattr(grammar, "ll_matcher", None)
    return (matcher.get_error() or None) if matcher is not None else None


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


# -- one backend


@dataclass(frozen=True)
class Report:
    """One backend's outcome over its cases. `memory_mib` is the peak of the process's growth."""

    backend: str
    setup_s: float
    memory_mib: float
    times: Times
    verdicts: tuple[Verdict, ...]

    def count(self, what: Callable[[Verdict], object]) -> int:
        return sum(bool(what(verdict)) for verdict in self.verdicts)

    def share(self, what: Callable[[Verdict], object]) -> float:
        return self.count(what) / len(self.verdicts) if self.verdicts else 0.0

    def total(self, what: Callable[[Verdict], int]) -> int:
        return sum(map(what, self.verdicts))

    def numbers(self) -> dict[str, Any]:
        """All of it, for JSON; the names of the table's rows with units."""
        times = asdict(self.times)
        return {
            "setup_s": self.setup_s,
            "memory_mib": self.memory_mib,
            "schemas": {
                "tried": len(self.verdicts),
                "right": self.count(lambda one: one.right),
                "by_automata": self.count(lambda one: one.compiled_to == "SglGrammar"),
                "refused": self.count(lambda one: one.refused),
                "gave_up": self.count(lambda one: one.gave_up),
                "failed": self.count(lambda one: one.failed),
                "valid_refused": self.count(lambda one: one.valid_refused),
                "invalid_accepted": self.count(lambda one: one.invalid_accepted),
            },
            "instances": {
                "valid": self.total(lambda one: one.num_valid),
                "valid_refused": self.total(lambda one: len(one.valid_refused)),
                "invalid": self.total(lambda one: one.num_invalid),
                "invalid_accepted": self.total(lambda one: len(one.invalid_accepted)),
            },
            "disagreements": self.total(lambda one: one.disagreements),
            **{f"{name}_us": summary(values) for name, values in times.items()},
            "verdicts": [{**asdict(one), "kind": one.kind} for one in self.verdicts],
        }


def summary(values_ns: Sequence[int]) -> dict[str, float] | None:
    """Microseconds; None if there is nothing to sum up."""
    if not values_ns:
        return None
    found = {f"p{percent}": percentile(values_ns, percent) for percent in (50, 95, 99)}
    found |= {"max": max(values_ns), "mean": statistics.fmean(values_ns)}
    return {"count": len(values_ns), **{name: value / 1000 for name, value in found.items()}}


def measure(
    name: str,
    make: Callable[[], Any],
    cases: Sequence[Case],
    trivial: Walk,
    eos_token_id: int,
    limit_s: float,
) -> Report:
    """Sets the backend up and puts all cases to it; a failing set-up is raised."""
    gc.collect()
    _give_freed_memory_back()
    gc.freeze()
    gc.disable()
    try:
        before = peak = resident_bytes()
        begun_s = time.perf_counter()
        asker = Asker(make(), eos_token_id, limit_s=max(limit_s, 600.0))
        asker.ask(Case(TRIVIAL.name, TRIVIAL.text, (trivial,)))
        setup_s = time.perf_counter() - begun_s
        asker.limit_s, asker.times = limit_s, Times()
        verdicts = []
        with native_code_silenced() as screen:
            for case in tqdm(cases, desc=f"{name:9}", unit="schema", file=screen):
                verdicts.append(asker.ask(case))
                peak = max(peak, resident_bytes())
                gc.collect(0)
    finally:
        gc.enable()
        gc.unfreeze()
    return Report(name, setup_s, (peak - before) / 2**20, asker.times, tuple(verdicts))


@contextmanager
def native_code_silenced() -> Iterator[TextIO]:
    """xgrammar warns of every schema that it does not observe in full, past Python, on descriptor
    2, which meanwhile leads nowhere. What is given still leads to the screen."""
    sys.stderr.flush()
    screen = os.fdopen(os.dup(2), "w")
    with screen, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield screen
        finally:
            os.dup2(screen.fileno(), 2)


def _give_freed_memory_back() -> None:
    """So that a backend does not live in what an earlier one has left, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


# -- the vocabulary and the backends


def tokenizer_of(folder: str | None) -> Any:
    """Mistral's vocabulary of 131,072 tokens, which comes with vLLM, or a model's.

    Raises ValueError if it cannot be had.
    """
    try:
        if folder is None:
            from transformers.integrations.mistral import convert_tekken_tokenizer

            return convert_tekken_tokenizer(str(files("mistral_common") / "data" / TEKKEN))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(resolve_model(folder)))
    except Exception as error:
        raise ValueError(f"no tokenizer of {folder or TEKKEN}: {error}") from error


def backend_class(name: str) -> Callable[..., Any] | str:
    """The backend's class, or why there is none."""
    source = BACKENDS[name]
    missing = [package for package in source.packages if find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    try:
        found = getattr(importlib.import_module(source.module), source.name)
        if source.reading is not None:
            from sgl_vllm.fsm.schema import SchemaSemantics

            return partial(found, semantics=SchemaSemantics(source.reading))
        return found
    except (ImportError, AttributeError) as error:
        return str(error)


# -- the table


@dataclass(frozen=True)
class Row:
    """A line of the table: a label, a number of a report, its format, and which way is better: 1 if
    more is, -1 if less is, 0 if neither."""

    label: str
    value: Callable[[Mapping[str, Any]], float | None]
    form: str
    better: int


def _time(name: str, statistic: str, scale: float = 1.0) -> Callable[..., float | None]:
    def value(numbers: Mapping[str, Any]) -> float | None:
        found = numbers[f"{name}_us"]
        return None if found is None else found[statistic] * scale

    return value


def _of(group: str, name: str) -> Callable[..., float | None]:
    return lambda numbers: numbers[group][name]


_MS = 1e-3
ROWS = (
    Row("schemas", _of("schemas", "tried"), ",d", 0),
    Row("  right", _of("schemas", "right"), ",d", 1),
    Row("  by the plugin's automata", _of("schemas", "by_automata"), ",d", 0),
    Row("  refused in compiling", _of("schemas", "refused"), ",d", -1),
    Row("  given up: too slow", _of("schemas", "gave_up"), ",d", -1),
    Row("  failed later", _of("schemas", "failed"), ",d", -1),
    Row("  with a valid instance refused", _of("schemas", "valid_refused"), ",d", -1),
    Row("  with an invalid instance accepted", _of("schemas", "invalid_accepted"), ",d", -1),
    Row("valid instances tried", _of("instances", "valid"), ",d", 0),
    Row("  refused", _of("instances", "valid_refused"), ",d", -1),
    Row("invalid instances tried", _of("instances", "invalid"), ",d", 0),
    Row("  accepted", _of("instances", "invalid_accepted"), ",d", -1),
    Row("mask and accept disagree", lambda numbers: numbers["disagreements"], ",d", -1),
    *(
        Row(f"compile, {statistic}, ms", _time("compile", statistic, _MS), ",.3f", -1)
        for statistic in ("p50", "mean", "p95", "p99", "max")
    ),
    *(
        Row(f"compile again, {statistic}, ms", _time("compile_again", statistic, _MS), ",.3f", -1)
        for statistic in ("p50", "p95", "max")
    ),
    Row("masks filled", _time("mask", "count"), ",.0f", 0),
    *(
        Row(f"mask, {statistic}, µs", _time("mask", statistic), ",.1f", -1)
        for statistic in ("p50", "mean", "p95", "p99", "max")
    ),
    *(
        Row(f"accept, {statistic}, µs", _time("accept", statistic), ",.1f", -1)
        for statistic in ("p50", "mean", "p99")
    ),
    Row("set-up, s", lambda numbers: numbers["setup_s"], ".2f", -1),
    Row("memory, MiB", lambda numbers: numbers["memory_mib"], ",.0f", -1),
)


def best(row: Row, numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The backends that do best in a line, of those that had all schemas; none if nothing differs
    or there is only one."""
    most = max(one["schemas"]["tried"] for one in numbers.values())
    values = {
        name: row.value(one)
        for name, one in numbers.items()
        if one["schemas"]["tried"] == most and row.value(one) is not None
    }
    if not row.better or len(set(values.values())) < 2:
        return []
    choose = max if row.better > 0 else min
    wanted = choose(value for value in values.values() if value is not None)
    return [name for name, value in values.items() if value == wanted]


def show(reports: Sequence[Report], heading: str, console: Console) -> None:
    numbers = {report.backend: report.numbers() for report in reports}
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("")
    for name in (*numbers, "best"):
        table.add_column(name, justify="right")
    for row in ROWS:
        winners = best(row, numbers)
        cells = []
        for name, one in numbers.items():
            value = row.value(one)
            shown = "" if value is None else format(value, row.form)
            cells.append(f"[green]{shown}[/green]" if name in winners else shown)
        table.add_row(row.label, *cells, ", ".join(winners))
    console.print(heading)
    console.print(table)
    counts = {len(report.verdicts) for report in reports}
    if len(counts) > 1:
        console.print(f'Not all had the same schemas: "best" is of those with {max(counts)}.')


def show_by_keyword(reports: Sequence[Report], console: Console) -> None:
    """How many schemas of each file of the suite are right, and in parentheses with how many an
    invalid instance is accepted."""
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("right (accept something invalid)")
    table.add_column("schemas", justify="right")
    found: dict[str, dict[str, list[Verdict]]] = {}
    for report in reports:
        table.add_column(report.backend, justify="right")
        for verdict in report.verdicts:
            of_file = found.setdefault(verdict.name.partition(":")[0], {})
            of_file.setdefault(report.backend, []).append(verdict)
    for file, of_backend in found.items():
        cells = []
        for report in reports:
            verdicts = of_backend.get(report.backend, [])
            num_lax = sum(bool(one.invalid_accepted) for one in verdicts)
            cells.append(f"{sum(one.right for one in verdicts)}" + f" ({num_lax})" * bool(num_lax))
        table.add_row(file, str(max(map(len, of_backend.values()))), *cells)
    console.print(table)


def differences(reports: Sequence[Report]) -> list[str]:
    """A line for each schema over which backends that had it do not agree, with their verdicts."""
    by_name: dict[str, dict[str, Verdict]] = {}
    for report in reports:
        for verdict in report.verdicts:
            by_name.setdefault(verdict.name, {})[report.backend] = verdict
    return [
        f"{name}: " + ", ".join(f"{backend} {one.kind}" for backend, one in found.items())
        for name, found in by_name.items()
        if len({one.right for one in found.values()}) > 1
    ]


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it measured something, 1 if there was no backend, 130 if interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.parent}")
    try:
        suite = arguments.suite
        everything = schemas(arguments.data) if suite is None else load_suite(suite)
        chosen = everything[:: arguments.every][: arguments.limit]
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if find_spec("vllm") is None:
        print("benchmarks.masks: it needs vLLM, whose backends it compares", file=sys.stderr)
        return 1
    try:
        tokenizer = tokenizer_of(arguments.tokenizer)
    except ValueError as error:
        parser.error(str(error))
    if tokenizer.eos_token_id is None:
        parser.error("this tokenizer has no token for the end of a sequence")
    try:
        reports = _run(arguments, chosen, tokenizer)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if not reports:
        return 1
    origin = suite.name if suite else FILE if arguments.data else "made-up"
    heading = (
        f"vLLM {version('vllm')}; {len(tokenizer):,} tokens of {arguments.tokenizer or TEKKEN}; "
        f"schemas: {origin}"
    )
    console = Console(highlight=False, soft_wrap=True)
    show(reports, heading, console)
    if suite is not None:
        console.print()
        show_by_keyword(reports, console)
    if arguments.details:
        console.print("\nWhere they do not agree:")
        for line in differences(reports):
            console.print(f"  {line}", markup=False)
    if arguments.json:
        arguments.json.write_text(_as_json(arguments, tokenizer, origin, reports))
    return 0


def _run(arguments: argparse.Namespace, chosen: Sequence[Schema], tokenizer: Any) -> list[Report]:
    from vllm.config import VllmConfig

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # they log each refusal

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    config = VllmConfig()
    cases = cases_of(tqdm(chosen, desc="tokenize", unit="schema", file=sys.stderr), encode)
    trivial = Walk(tuple(encode(TRIVIAL_INSTANCE)), valid=True)
    reports = []
    for name in arguments.backends:
        made = backend_class(name)
        if isinstance(made, str):
            print(f"without {name}: {made}", file=sys.stderr)
            continue

        def make(made: Callable[..., Any] = made) -> Any:
            return made(config, tokenizer=tokenizer, vocab_size=len(tokenizer))

        own = evenly(cases, arguments.outlines_limit) if name == "outlines" else cases
        try:
            reports.append(
                measure(name, make, own, trivial, tokenizer.eos_token_id, arguments.schema_limit)
            )
        except Exception as error:
            print(f"without {name}: {_in_short(error)}", file=sys.stderr)
    return reports


def _as_json(
    arguments: argparse.Namespace, tokenizer: Any, origin: str, reports: Sequence[Report]
) -> str:
    versions = {"python": sys.version.split()[0]}
    for package in ("vllm", "torch", "xgrammar", "llguidance", "outlines_core", "sgl-vllm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
    }
    content = {
        "schemas": origin,
        "vocabulary": {"name": arguments.tokenizer or TEKKEN, "tokens": len(tokenizer)},
        "backends": {report.backend: report.numbers() for report in reports},
        "arguments": plain,
        "versions": versions,
    }
    return json.dumps(content, indent=2) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.masks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backends",
        type=_backends,
        default=DEFAULT_BACKENDS,
        metavar="A,B",
        help=f"which, in which order; default: {','.join(DEFAULT_BACKENDS)}, as far as installed",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help=f"a model's; default: Mistral's {TEKKEN}"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help=f"folder with {FILE}; default: made-up schemas"
    )
    parser.add_argument(
        "--suite",
        type=Path,
        metavar="FILE",
        help="archive of the JSON-Schema-Test-Suite, .tar.gz: drafts 7 and 2020-12, with optional",
    )
    parser.add_argument("--every", type=positive, default=1, metavar="K", help="each K-th schema")
    parser.add_argument("--limit", type=positive, metavar="N", help="at most so many schemas")
    parser.add_argument(
        "--outlines-limit", type=positive, default=40, metavar="N", help="for outlines; default 40"
    )
    parser.add_argument(
        "--schema-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="give a schema up after so long; default 20",
    )
    parser.add_argument(
        "--details", action="store_true", help="list the schemas on which backends do not agree"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all numbers, every verdict and the versions"
    )
    return parser


def _backends(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BACKENDS]:
        raise argparse.ArgumentTypeError(
            f"there is no backend {unknown[0]!r}; choose from {', '.join(BACKENDS)}"
        )
    return names


if __name__ == "__main__":
    code = main()
    # A compilation that was given up may still be under way in a thread that cannot be stopped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
