"""Which tokens may come next: vLLM's structured-output backends and the plugin's, in one run.

    python -m benchmarks.masks                                # 40 made-up schemas, all backends
    python -m benchmarks.masks --data DIR --json masks.json   # MaskBench's: maskbench_dev.jsonl.gz
    python -m benchmarks.masks --data DIR --backends xgrammar sgl --every 10
    python -m benchmarks.masks --tokenizer FOLDER             # with a model's own vocabulary

All are asked through vLLM's interface, in the order in which vLLM asks: a schema is compiled, and
an instance goes in token by token, a row of the bit mask filled before each token and once more
before the end of the sequence. The mask decides, as it does for the sampler. A schema is *right*
when it compiles, every valid instance comes through to its end, and every invalid one is stopped
somewhere. One without instances is right when it compiles.

- *compile* is the first time a schema is met, *compile again* what a later request with the same
  schema waits for, *mask* one `fill_bitmask` of one row, *accept* one `accept_tokens` of one token.
  xgrammar compiles with up to 8 threads, the others with one.
- What is refused has no compile time; so has what outlines compiles for more than 5 s, as vLLM then
  refuses it. What is given up, after 20 s, counts with this limit.
- *Set-up* is the vocabulary's preprocessing and one trivial schema; *memory* is the process's
  growth from before the set-up to its peak. Backends run one after the other, each alone.
- The garbage collector is on, with what set-up has made frozen, as in vLLM's engine.
- outlines takes seconds per schema: it gets 40, evenly chosen.
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
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from tqdm import tqdm

from benchmarks.arms import percentile
from benchmarks.command import figures_table, parser_of, positive, versions, write_json
from benchmarks.mask_verdicts import (
    WAYS_TO_FAIL,
    Asker,
    Times,
    Verdict,
    evenly,
    in_short,
)
from benchmarks.models import resolve_model
from benchmarks.schemas import FILE, Instance, Schema, schemas

TEKKEN = "tekken_240911.json"
MAX_SCHEMAS_OF_OUTLINES = 40
TRIVIAL = Schema("", '{"type": "boolean"}', (Instance("true", valid=True),))
LIMIT_S = 20.0
"""A schema that takes longer is given up."""

_VLLM = "vllm.v1.structured_output"
BACKENDS: dict[str, tuple[str, str, str | None]] = {
    "xgrammar": (f"{_VLLM}.backend_xgrammar", "XgrammarBackend", None),
    "guidance": (f"{_VLLM}.backend_guidance", "GuidanceBackend", None),
    "outlines": (f"{_VLLM}.backend_outlines", "OutlinesBackend", None),
    "sgl": ("sgl_vllm.fsm.vllm.backend", "SglBackend", None),
    "sgl-stock": ("sgl_vllm.fsm.vllm.backend", "SglBackend", "stock"),
}
"""Module and class of each, and how it is to read schemas, if not in its usual way."""

DEFAULT_BACKENDS = [name for name in BACKENDS if name != "sgl-stock"]


# -- one backend


@dataclass(frozen=True)
class Report:
    """One backend's outcome over its schemas. `memory_mib` is the peak of the process's growth,
    `collections_ns` is how long each full garbage collection took."""

    backend: str
    setup_s: float
    memory_mib: float
    collections_ns: tuple[int, ...]
    times: Times
    verdicts: tuple[Verdict, ...]

    def numbers(self) -> dict[str, Any]:
        """All of it, for JSON; the names of the table's rows with units."""

        def total(what: Callable[[Verdict], int]) -> int:
            return sum(map(what, self.verdicts))

        return {
            "setup_s": self.setup_s,
            "memory_mib": self.memory_mib,
            "collections": len(self.collections_ns),
            "longest_collection_ms": max(self.collections_ns, default=0) / 1e6,
            "schemas": {
                "tried": len(self.verdicts),
                "right": total(lambda one: one.kind == "right"),
                "by_automata": total(lambda one: one.compiled_to == "SglGrammar"),
                **{
                    name: sum(bool(getattr(one, name)) for one in self.verdicts)
                    for name in WAYS_TO_FAIL
                },
            },
            "instances": {
                "valid": total(lambda one: one.num_valid),
                "valid_refused": total(lambda one: len(one.valid_refused)),
                "invalid": total(lambda one: one.num_invalid),
                "invalid_accepted": total(lambda one: len(one.invalid_accepted)),
            },
            "disagreements": total(lambda one: one.disagreements),
            **{f"{name}_us": summary(values) for name, values in asdict(self.times).items()},
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
    chosen: Sequence[Schema],
    tokenizer: Any,
) -> Report:
    """Sets the backend up and puts all schemas to it; a failing set-up is raised. The garbage
    collector runs as in vLLM's engine, which freezes what start-up has made."""
    import psutil

    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # so that it does not live in what an earlier one left
    process = psutil.Process()
    before = peak = process.memory_info().rss
    begun_s = time.perf_counter()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    asker = Asker(make(), encode, tokenizer.eos_token_id, limit_s=600.0)
    asker.ask(TRIVIAL)
    setup_s = time.perf_counter() - begun_s
    asker.limit_s, asker.times = LIMIT_S, Times()
    verdicts = []
    gc.collect()
    gc.freeze()
    try:
        with native_code_silenced() as screen, full_collections() as collections_ns:
            for schema in tqdm(chosen, desc=f"{name:9}", unit="schema", file=screen):
                verdicts.append(asker.ask(schema))
                peak = max(peak, process.memory_info().rss)
    finally:
        gc.unfreeze()
    memory_mib = (peak - before) / 2**20
    return Report(name, setup_s, memory_mib, tuple(collections_ns), asker.times, tuple(verdicts))


@contextmanager
def full_collections() -> Iterator[list[int]]:
    """The nanoseconds that each collection of the oldest generation takes meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            now_ns = time.perf_counter_ns()
            found.append(now_ns if phase == "start" else now_ns - found.pop())

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


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
    module, class_name, reading = BACKENDS[name]
    try:
        found = getattr(importlib.import_module(module), class_name)
        if class_name == "SglBackend":  # as a server does when it starts
            importlib.import_module("sgl_vllm.fsm.warm_up").compile_loops()
        if name == "outlines":  # which vLLM imports when it is first asked
            importlib.import_module("outlines_core")
    except (ImportError, AttributeError) as error:
        return str(error)
    if reading is None:
        return found
    return partial(found, by_spec=reading == "spec")


# -- the table


ROWS = (
    ("schemas", "schemas.tried", ",d"),
    ("  right", "schemas.right", ",d"),
    ("  by the plugin's automata", "schemas.by_automata", ",d"),
    ("  refused in compiling", "schemas.refused", ",d"),
    ("  given up: too slow", "schemas.gave_up", ",d"),
    ("  failed later", "schemas.failed", ",d"),
    ("  with a valid instance refused", "schemas.valid_refused", ",d"),
    ("  with an invalid instance accepted", "schemas.invalid_accepted", ",d"),
    ("valid instances tried", "instances.valid", ",d"),
    ("  refused", "instances.valid_refused", ",d"),
    ("invalid instances tried", "instances.invalid", ",d"),
    ("  accepted", "instances.invalid_accepted", ",d"),
    ("mask and accept disagree", "disagreements", ",d"),
    *((f"compile, {of}, µs", f"compile_us.{of}", ",.0f") for of in ("p50", "mean", "p95", "max")),
    *((f"compile again, {of}, µs", f"compile_again_us.{of}", ",.0f") for of in ("p50", "p95")),
    ("masks filled", "mask_us.count", ",d"),
    *((f"mask, {of}, µs", f"mask_us.{of}", ",.1f") for of in ("p50", "mean", "p95", "p99", "max")),
    *((f"accept, {of}, µs", f"accept_us.{of}", ",.1f") for of in ("p50", "mean", "p99")),
    ("set-up, s", "setup_s", ".2f"),
    ("memory, MiB", "memory_mib", ",.0f"),
    ("full garbage collections", "collections", ",d"),
    ("  the longest, ms", "longest_collection_ms", ",.1f"),
)
"""Lines of the table: the words, the place of the number in `Report.numbers`, and its format."""


def cell(numbers: Any, place: str, form: str) -> str:
    for name in place.split("."):
        numbers = numbers and numbers[name]
    return "" if numbers is None else format(numbers, form)


def show(reports: Sequence[Report], heading: str, console: Console) -> None:
    table = figures_table("", *(report.backend for report in reports))
    numbers = [report.numbers() for report in reports]
    for label, place, form in ROWS:
        table.add_row(label, *(cell(one, place, form) for one in numbers))
    console.print(heading)
    console.print(table)


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it measured something, 1 if there was no backend, 130 if interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        chosen = schemas(arguments.data)[:: arguments.every]
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
    origin = FILE if arguments.data else "made-up"
    heading = (
        f"vLLM {version('vllm')}; {len(tokenizer):,} tokens of {arguments.tokenizer or TEKKEN}; "
        f"schemas: {origin}"
    )
    console = Console(highlight=False, soft_wrap=True)
    show(reports, heading, console)
    write_json(arguments.json, _document(arguments, tokenizer, origin, reports))
    return 0


def _run(arguments: argparse.Namespace, chosen: Sequence[Schema], tokenizer: Any) -> list[Report]:
    from vllm.config import VllmConfig

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # they log each refusal

    config = VllmConfig()
    reports = []
    for name in arguments.backends:
        made = backend_class(name)
        if isinstance(made, str):
            print(f"without {name}: {made}", file=sys.stderr)
            continue

        def make(made: Callable[..., Any] = made) -> Any:
            return made(config, tokenizer=tokenizer, vocab_size=len(tokenizer))

        own = evenly(chosen, MAX_SCHEMAS_OF_OUTLINES) if name == "outlines" else chosen
        try:
            reports.append(measure(name, make, own, tokenizer))
        except Exception as error:
            print(f"without {name}: {in_short(error)}", file=sys.stderr)
    return reports


def _document(
    arguments: argparse.Namespace, tokenizer: Any, origin: str, reports: Sequence[Report]
) -> dict[str, Any]:
    return {
        "schemas": origin,
        "vocabulary": {"name": arguments.tokenizer or TEKKEN, "tokens": len(tokenizer)},
        "backends": {report.backend: report.numbers() for report in reports},
        "arguments": vars(arguments),
        "versions": versions("torch", "xgrammar", "llguidance", "outlines_core"),
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("masks", __doc__)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=DEFAULT_BACKENDS,
        help="in this order; default: all that are installed, but for sgl-stock",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help=f"a model's; default: Mistral's {TEKKEN}"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help=f"folder with {FILE}; default: made-up schemas"
    )
    parser.add_argument("--every", type=positive, default=1, metavar="K", help="each K-th schema")
    return parser


if __name__ == "__main__":
    code = main()
    # A compilation that was given up may still be under way in a thread that cannot be stopped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
