"""A fixed part of the fuzzer of conjunctions (`schema_fuzz.py`), and that it can find errors."""

import pytest

pytest.importorskip("jsonschema")

from tests.effort import examples
from tests.unit.fsm import schema_fuzz

NUM_SCHEMAS = 200


def test_no_conjunction_accepts_an_invalid_text():
    outcome = schema_fuzz.fuzz(examples(NUM_SCHEMAS), seed=0)
    assert outcome.wrong == []
    assert outcome.accepted > outcome.schemas  # not too many are refused


def test_a_compiler_that_reads_too_much_into_a_schema_is_found(monkeypatch):
    def careless(schema):
        schema.pop("items", None)
        return schema_fuzz_compile(schema)

    schema_fuzz_compile = schema_fuzz.compile_schema
    monkeypatch.setattr(schema_fuzz, "compile_schema", careless)
    assert schema_fuzz.fuzz(100, seed=0).wrong
