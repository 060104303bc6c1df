"""What vLLM's backends compile is compiled in a process of its own first. No model is needed."""

from __future__ import annotations

import gc
import json
import time

import psutil
import pytest
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.limits import COMPILE_TIMEOUT_S, CompilationLimitError
from sgl_vllm.fsm.vllm.resources import tokenizer_info
from sgl_vllm.fsm.vllm.sandbox import XgrammarSandbox
from tests.engine.fsm_backends import backend

MIB = 1 << 20
NEVER_DONE = "(a?)" * 25_000
MANY_ITEMS = '{"type":"array","minItems":60000000}'
"""A short schema. xgrammar refuses it, and llguidance takes 5 GB."""

SMALL_GRAMMAR = 'root ::= "a"'
LARGE_GRAMMAR = "root ::= " + " | ".join(f'"{n:04}" [a-c]+' for n in range(400))
LARGE = {
    Options.GRAMMAR: LARGE_GRAMMAR,
    Options.REGEX: "|".join(rf"number {n:03} [a-c]+" for n in range(300)),
    Options.JSON: json.dumps({"properties": {f"p{n}": {"type": "integer"} for n in range(100)}}),
    Options.STRUCTURAL_TAG: json.dumps(
        {
            "structures": [
                {"begin": f"<f{n}>", "schema": {"type": "integer"}, "end": f"</f{n}>"}
                for n in range(100)
            ],
            "triggers": ["<f"],
        }
    ),
}


@pytest.fixture(scope="module")
def stock_s():
    """Everything is handed on."""
    handing_on = backend(use_automata=False)
    yield handing_on
    handing_on.destroy()


@pytest.fixture(scope="module")
def guidance_s():
    """Everything is handed on to guidance."""
    handing_on = backend(use_automata=False, stock="guidance")
    yield handing_on
    handing_on.destroy()


@pytest.fixture(scope="module", autouse=True)
def _no_processes_of_other_files():
    """Backends that tests of other files have left behind may still have theirs."""
    gc.collect()
    _of_other_files.extend(psutil.Process().children())


_of_other_files: list[psutil.Process] = []


def sandbox_processes(worker: str = "xgrammar_worker") -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child not in _of_other_files
        and child.status() != psutil.STATUS_ZOMBIE  # an ended engine of another test
        and f"sgl_vllm.fsm.vllm.{worker}" in child.cmdline()
    ]


def test_the_process_of_xgrammar_does_not_load_torch(stock_s: SglBackend) -> None:
    stock_s.compile_grammar(Options.GRAMMAR, SMALL_GRAMMAR)
    (process,) = sandbox_processes()
    assert process.memory_info().rss < 200 * MIB
    assert not [one.path for one in process.memory_maps() if "libtorch" in one.path]


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_format_comes_out_as_from_stock(stock_s: SglBackend, kind: Options) -> None:
    spec = LARGE[kind]
    tried = stock_s.compile_grammar(kind, spec)
    stock = stock_s.xgrammar.compile_grammar(kind, spec)
    rows = [stock_s.allocate_token_bitmask(1).zero_() for _ in range(2)]
    tried.fill_bitmask(rows[0], 0)
    stock.fill_bitmask(rows[1], 0)
    assert rows[0].equal(rows[1])
    assert len(sandbox_processes()) == 1


def test_what_never_ends_is_refused_and_leaves_nothing_that_runs(stock_s: SglBackend) -> None:
    memory = psutil.Process().memory_info
    stock_s.compile_grammar(Options.GRAMMAR, LARGE_GRAMMAR)  # the process is there
    before, begun = memory().rss, time.monotonic()
    with pytest.raises(CompilationLimitError, match=r"takes more than 10 s or 1024 MiB"):
        stock_s.compile_grammar(Options.REGEX, NEVER_DONE)
    assert time.monotonic() - begun < 2 * COMPILE_TIMEOUT_S
    assert not sandbox_processes()
    time.sleep(1)
    assert memory().rss < before + 64 * MIB
    assert stock_s.compile_grammar(Options.GRAMMAR, LARGE_GRAMMAR)


def test_a_short_format_that_takes_gigabytes_is_refused_and_takes_none(
    guidance_s: SglBackend,
) -> None:
    memory = psutil.Process().memory_info
    guidance_s.compile_grammar(Options.JSON, '{"type": "integer"}')  # the process is there
    before, begun = memory().rss, time.monotonic()
    with pytest.raises(CompilationLimitError, match=r"takes more than 10 s or 512 MiB"):
        guidance_s.compile_grammar(Options.JSON, MANY_ITEMS)
    assert time.monotonic() - begun < 2 * COMPILE_TIMEOUT_S
    assert not sandbox_processes("guidance_worker")
    assert memory().rss < before + 64 * MIB


def test_what_was_compiled_once_is_not_tried_again(
    stock_s: SglBackend, guidance_s: SglBackend
) -> None:
    for one, worker in ((stock_s, "xgrammar_worker"), (guidance_s, "guidance_worker")):
        one.compile_grammar(Options.GRAMMAR, SMALL_GRAMMAR)
        for process in sandbox_processes(worker):
            process.kill()
            process.wait()
        one.compile_grammar(Options.GRAMMAR, SMALL_GRAMMAR)
        assert not sandbox_processes(worker)


def test_the_process_parses_a_schema_or_sends_nothing() -> None:
    xgrammar = backend().xgrammar
    sandbox = XgrammarSandbox(lambda: tokenizer_info(xgrammar))
    try:
        schema = '{"type": "string", "pattern": "^a+$"}'
        grammar = sandbox.parsed(("compile_json_schema", schema, {"any_whitespace": True}), "test")
        assert grammar is not None and len(grammar.patterns) == 1
        assert sandbox.parsed(("compile_json_schema", '{"type": "wrong"}', {}), "test") is None
    finally:
        sandbox.stop()
