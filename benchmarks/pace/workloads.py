"""The programs that schedulers are measured with: their prompts, and the text that is written.

Both arms write the same text of a program, held by the same grammar, so that they differ in their
steps alone. The cost of a grammar and of its bitmask grows with the vocabulary, so that is a real
one: Mistral's of 131,072 tokens, which comes with vLLM.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any  # Any: JSON, a tokenizer

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.ab.workloads.json_regex import CHARACTER
from benchmarks.ab.workloads.json_schema import MAX_SCHEMA_CHARACTERS
from benchmarks.ab.workloads.tool_calls import NUM_TOOLS, TOOLS
from benchmarks.models import DEMO_MODEL
from benchmarks.schemas import plain_schemas

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's folder, and the number of logits that its model would have."""

    folder: Path
    size: int

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.folder))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Of each token of a byte-level BPE; empty for special ones."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        special = set(self.tokenizer.all_special_ids)
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return [
            b"" if token in special else bytes(byte_of[character] for character in name)
            for token, name in enumerate(names)
        ]

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


DEMO = Vocabulary(DEMO_MODEL, 4096)
"""The shipped model's."""


def mistral(folder: Path) -> Vocabulary:
    """Converted into this folder, which takes 10 seconds. Raises ValueError if it cannot be had."""
    from benchmarks.masks import tokenizer_of

    tokenizer_of(None).save_pretrained(folder)
    shutil.copy(DEMO_MODEL / "config.json", folder)  # vLLM looks for one
    return Vocabulary(folder, 131_072)


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One request. Its prompt is all of the program so far, and `tokens`."""

    tokens: list[int]
    params: SamplingParams
    text: str | None = None


Program = list[Turn]


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(number)]


def _word(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(least, most)))


def _free(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _held(max_tokens: int = 256, **constraint: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(**constraint)
    return SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=outputs)


def _decoding(num_output: int, rng: random.Random, vocabulary: Vocabulary) -> Program:
    return [Turn(_tokens(rng, 256), _free(num_output))]


def _chats(rng: random.Random, vocabulary: Vocabulary) -> Program:
    """Long inputs, short replies."""
    return [Turn(_tokens(rng, num_new), _free(6)) for num_new in (700, 90, 90, 90)]


def _json_regex(rng: random.Random, vocabulary: Vocabulary) -> Program:
    """A character of a book, as `benchmarks.ab json_regex` asks for it."""
    jobs = ("baker", "doctor", "farmer", "nurse", "pilot", "teacher", "writer")
    fields = {
        "name": _word(rng, 3, 8).capitalize(),
        "house": rng.choice(("Gryffindor", "Hufflepuff", "Ravenclaw", "Slytherin")),
        "blood status": rng.choice(("Half-blood", "Muggle-born", "Pure-blood")),
        "occupation": rng.choice(jobs),
        "wand": {
            "wood": rng.choice(("elm", "holly", "oak", "pine", "willow")),
            "core": rng.choice(("dragon heartstring", "phoenix feather", "unicorn hair")),
            "length": rng.randrange(1001, 1400) / 100,
        },
        "alive": rng.random() < 0.5,
        "patronus": rng.choice(("fox", "horse", "otter", "stag", "swan")),
        "age": rng.randrange(10, 100),
        "pet": _word(rng, 3, 8),
    }
    text = json.dumps(fields)
    assert re.fullmatch(CHARACTER, text), text
    return [Turn(_tokens(rng, rng.randrange(20, 40)), _held(regex=CHARACTER), text)]


@cache
def _schemas_with_instance() -> list[tuple[str, str]]:
    """Some of the schemas of `benchmarks.ab json_schema`, each with an instance without white
    space, as vLLM holds it to. To compile one for a large vocabulary takes a second."""
    compact = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    found = []
    for one in plain_schemas(None, MAX_SCHEMA_CHARACTERS):
        valid = [instance.text for instance in one.instances if instance.valid]
        if valid:
            found.append((one.text, compact(json.loads(valid[0]))))
    return found[::3]


def _json_schema(rng: random.Random, vocabulary: Vocabulary) -> Program:
    schema, text = rng.choice(_schemas_with_instance())
    return [Turn(_tokens(rng, 230), _held(json=schema), text)]


def _tool_calls(rng: random.Random, vocabulary: Vocabulary) -> Program:
    """Two calls of one of three functions, in the form of Hermes, which vLLM holds them to."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    functions = rng.sample(TOOLS, NUM_TOOLS)
    tag = get_model_structural_tag(
        model="hermes",
        tools=[ChatCompletionToolsParam.model_validate(one) for one in functions],
        tool_choice="required",
        reasoning=False,
    )
    assert tag is not None
    turns: Program = []
    for num_new in (12, 30):
        function = rng.choice(functions)["function"]
        call = {"name": function["name"], "arguments": _instance(function["parameters"], rng)}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        prompt = vocabulary.tokens(json.dumps(functions)) if not turns else []
        params = _held(192, structural_tag=tag.model_dump_json())
        turns.append(Turn(prompt + _tokens(rng, num_new), params, text))
    return turns


def _instance(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value that fits a schema of `TOOLS`."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if schema["type"] == "object":
        return {name: _instance(one, rng) for name, one in schema["properties"].items()}
    if schema["type"] == "array":
        return [_instance(schema["items"], rng) for _ in range(schema.get("minItems", 1))]
    if schema["type"] == "string":
        least, most = schema.get("minLength", 4), min(schema.get("maxLength", 12), 12)
        return _word(rng, min(least, most), most)
    if schema["type"] == "boolean":
        return rng.random() < 0.5
    return rng.randint(schema.get("minimum", 1), schema.get("maximum", 9))


MAKERS: dict[str, Callable[[random.Random, Vocabulary], Program]] = {
    "decoding": partial(_decoding, 128),
    "chats": _chats,
    "json_schema": _json_schema,
    "json_regex": _json_regex,
    "tool_calls": _tool_calls,
}
STEADY = "decoding"
"""The workload whose steps are measured while requests neither come nor end."""


def program(workload: str, number: int, vocabulary: Vocabulary, *, steady: bool = False) -> Program:
    """The same for the same number, always. With `steady`, `decoding` goes on and on."""
    make = partial(_decoding, 3000) if steady else MAKERS[workload]
    return make(random.Random(f"{workload} {number}"), vocabulary)
