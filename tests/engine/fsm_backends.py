"""Our backend of structured output beside stock's, both over the demo's vocabulary."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from tests.effort import examples

WALKS = examples(2)
STEPS = 40

OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "score": {"type": "number"},
        "kind": {"enum": ["a", "ab", "β", 1, 2.5, None, True]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["age", "kind"],
}


def backend(**changes: Any) -> SglBackend:
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=changes.pop("compact", False),
            disable_additional_properties=False,
        ),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        speculative_config=None,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    return SglBackend(
        config, tokenizer=tokenizer, vocab_size=len(tokenizer), **{"by_spec": False, **changes}
    )


def bits(ours: SglBackend, grammar: Any) -> set[int]:
    """The tokens that a grammar's mask allows."""
    row = ours.allocate_token_bitmask(1).fill_(0)
    grammar.fill_bitmask(row, 0)
    flags = np.unpackbits(row.numpy()[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


def may_end_invalid(ours: SglBackend, token: int) -> bool:
    """Whether xgrammar takes bytes after a token that make no UTF-8 with it: halves of surrogates,
    overlong forms, or characters beyond the last one."""
    return ours.resources.token_bytes[token].endswith((b"\xe0", b"\xed", b"\xf0", b"\xf4"))


def walk_beside_stock(ours: SglBackend, kind: Options, spec: str, num_walks: int = WALKS) -> None:
    """Random legal tokens, the masks of both compared before each."""
    rng = random.Random(spec)
    for _ in range(num_walks):
        grammar = ours.compile_grammar(kind, spec)
        stock = ours.xgrammar.compile_grammar(kind, spec)
        assert isinstance(grammar, SglGrammar), "handed on: nothing is compared"
        for _ in range(STEPS):
            legal = bits(ours, grammar)
            assert legal == bits(ours, stock)
            token = rng.choice([one for one in sorted(legal) if not may_end_invalid(ours, one)])
            assert grammar.accept_tokens("", [token]) and stock.accept_tokens("", [token])
            assert grammar.is_terminated() == stock.is_terminated()
            if grammar.is_terminated():
                break
