"""Large formats for xgrammar are compiled in a process of their own first. No model is needed."""

from __future__ import annotations

import json
import time

import psutil
import pytest
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.limits import CompilationLimitError
from sgl_vllm.fsm.vllm.sandbox import MAX_UNSANDBOXED_CHARS, SANDBOX_TIMEOUT_S
from tests.engine.test_fsm_like_stock import backend

MIB = 1 << 20
NEVER_DONE = "(a?)" * 25_000
LARGE_GRAMMAR = "root ::= " + " | ".join(f'"{n:04}" [a-c]+' for n in range(400))
LARGE = {
    Options.GRAMMAR: LARGE_GRAMMAR,
    Options.REGEX: "|".join(rf"number {n:03} [a-c]+" for n in range(300)),
    Options.JSON: json.dumps({"properties": {f"p{n}": {"type": "integer"} for n in range(300)}}),
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


def sandbox_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE  # an ended engine of another test
        and "sgl_vllm.fsm.vllm.xgrammar_worker" in child.cmdline()
    ]


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_format_comes_out_as_from_stock(stock_s: SglBackend, kind: Options) -> None:
    spec = LARGE[kind]
    assert len(spec) > MAX_UNSANDBOXED_CHARS
    tried = stock_s.compile_grammar(kind, spec)
    stock = stock_s.resources.xgrammar.compile_grammar(kind, spec)
    rows = [stock_s.allocate_token_bitmask(1).zero_() for _ in range(2)]
    tried.fill_bitmask(rows[0], 0)
    stock.fill_bitmask(rows[1], 0)
    assert rows[0].equal(rows[1])
    assert len(sandbox_processes()) == 1


def test_what_never_ends_is_refused_and_leaves_nothing_that_runs(stock_s: SglBackend) -> None:
    memory = psutil.Process().memory_info
    stock_s.compile_grammar(Options.GRAMMAR, LARGE_GRAMMAR)  # the process is there
    before, begun = memory().rss, time.monotonic()
    with pytest.raises(CompilationLimitError, match=r"takes more than 5 s or 2048 MiB"):
        stock_s.compile_grammar(Options.REGEX, NEVER_DONE)
    assert time.monotonic() - begun < 2 * SANDBOX_TIMEOUT_S
    assert not sandbox_processes()
    time.sleep(1)
    assert memory().rss < before + 64 * MIB
    assert stock_s.compile_grammar(Options.GRAMMAR, LARGE_GRAMMAR)


def test_what_is_wrong_is_told_as_stock_tells_it(stock_s: SglBackend) -> None:
    wrong = LARGE_GRAMMAR + " | missing"
    with pytest.raises(ValueError, match="missing"):
        stock_s.compile_grammar(Options.GRAMMAR, wrong)


def test_small_formats_take_no_process() -> None:
    others = len(sandbox_processes())
    small = backend(use_automata=False)
    small.compile_grammar(Options.GRAMMAR, 'root ::= "a"')
    assert len(sandbox_processes()) == others
