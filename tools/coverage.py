"""Writes docs/coverage.md's tables and the README's: which part is on in which deployment.

Owns the deployments, the small models that stand for families of models, and the form of the
tables. Does not own the answers: they are those of `sgl-vllm doctor MODEL`, so of the functions
that an engine asks. A model is a `config.json` of a few layers; there are no weights.

    python -m tools.coverage [--check]

Takes about 40 s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any  # Any: JSON

from sgl_vllm.preview.outlook import Outlook, PartOutlook, State
from tools.generated import ROOT, GeneratedSection
from tools.outlooks import CPU, GPU, MODELS_FOLDER, ask

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
_EAGLE3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 1024,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
_THREE_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama_draft": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
    },
    "llama_eagle3": _EAGLE3,
    "gpt_oss_eagle3": {**_EAGLE3, "head_dim": 64},  # with KV of the same shape as gpt-oss
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 64,
        "layer_types": _THREE_WINDOWS,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_key_value_heads": 4,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 64,
        "layer_types": _THREE_WINDOWS,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 64,
    },
    "llama4": {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "attention_chunk_size": 64,
        "moe_layers": [],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **_EXPERTS,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **_ROUTED_EXPERTS,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        **_ROUTED_EXPERTS,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoEForCausalLM"],
        "mlp_layer_types": ["dense"] * 4,
        "sliding_window": 64,
        "layer_types": _THREE_WINDOWS,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **_EXPERTS,
    },
}
"""What each `config.json` has beside `_COMMON`. The sizes do not matter, the kinds of layers do."""

CONFIGS = {name: {**_COMMON, **values} for name, values in MODELS.items()}


@dataclass(frozen=True)
class Deployment:
    """A row.

    Attributes:
        flags: of `vllm serve`.
        devices: where the row is shown.
    """

    name: str
    model: str = "llama"
    flags: tuple[str, ...] = ()
    devices: tuple[str, ...] = (CPU, GPU)


def _speculation(**values: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"num_speculative_tokens": 2, **values})


_KV_EVENTS = "--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'
_OFFLOADING = "--kv-offloading-size", "1"

DEPLOYMENTS = (
    Deployment("full attention (Llama, Qwen3, ...), vLLM's defaults"),
    Deployment("sliding window in some layers: Gemma 3", "gemma3"),
    Deployment("sliding window with smaller blocks: Gemma 4", "gemma4"),
    Deployment("sliding window in some layers: gpt-oss", "gpt_oss"),
    Deployment("sliding window in all layers: Mistral 7B", "mistral"),
    Deployment("chunked local attention: Llama 4", "llama4"),
    Deployment("recurrent hybrid: Qwen3-Next", "qwen3_next"),
    Deployment("recurrent hybrid: Nemotron-H", "nemotron_h"),
    Deployment("MLA: DeepSeek V3, Kimi K2", "deepseek_v3", devices=(GPU,)),
    # With AMX, vLLM has another backend, which caches prefixes.
    Deployment(
        "MLA without AMX: `--attention-backend CPU_MLA`",
        "deepseek_v3",
        ("--attention-backend", "CPU_MLA"),
        devices=(CPU,),
    ),
    Deployment("n-gram speculation", flags=_speculation(method="ngram")),
    Deployment("n-gram speculation with windows: gpt-oss", "gpt_oss", _speculation(method="ngram")),
    Deployment(
        "EAGLE 3 with windows: gpt-oss",
        "gpt_oss",
        _speculation(method="eagle3", model=f"{MODELS_FOLDER}/gpt_oss_eagle3"),
    ),
    Deployment(
        "n-gram speculation with recurrent layers: Qwen3-Next",
        "qwen3_next",
        _speculation(method="ngram"),
    ),
    Deployment(
        "EAGLE 3", flags=_speculation(method="eagle3", model=f"{MODELS_FOLDER}/llama_eagle3")
    ),
    Deployment("MTP (GLM-4.5)", "glm4_moe", _speculation(method="mtp", num_speculative_tokens=1)),
    Deployment(
        "MTP with windows: K-EXAONE",
        "exaone_moe",
        _speculation(method="mtp", num_speculative_tokens=1),
    ),
    Deployment(
        "MLA with MTP: DeepSeek V3",
        "deepseek_v3",
        _speculation(method="mtp", num_speculative_tokens=1),
        devices=(GPU,),
    ),
    Deployment(
        "draft model",
        flags=_speculation(method="draft_model", model=f"{MODELS_FOLDER}/llama_draft"),
    ),
    # vLLM's offloading does not start on a CPU.
    Deployment(
        "KV connector: `--kv-offloading-size`",
        flags=_OFFLOADING,
        devices=(GPU,),
    ),
    Deployment(
        "KV connector with windows: gpt-oss",
        "gpt_oss",
        _OFFLOADING,
        devices=(GPU,),
    ),
    Deployment(
        "KV connector with recurrent layers: Qwen3-Next",
        "qwen3_next",
        _OFFLOADING,
        devices=(GPU,),
    ),
    Deployment("KV events: `--kv-events-config`", flags=_KV_EVENTS),
    Deployment("KV events with recurrent layers: Qwen3-Next", "qwen3_next", _KV_EVENTS),
    Deployment("`--pipeline-parallel-size 2`", flags=("--pipeline-parallel-size", "2")),
    Deployment("`--tensor-parallel-size 2`", flags=("--tensor-parallel-size", "2")),
    Deployment(
        "custom logits processor",
        flags=("--logits-processors", "vllm.v1.sample.logits_processor:LogitBiasLogitsProcessor"),
    ),
    Deployment("LoRA: `--enable-lora`", flags=("--enable-lora",)),
    Deployment(
        "`--distributed-executor-backend external_launcher`",
        flags=("--distributed-executor-backend", "external_launcher"),
    ),
    Deployment(
        "mixture of experts, `--data-parallel-size 2`", "qwen3_moe", ("--data-parallel-size", "2")
    ),
    Deployment("full attention, `--data-parallel-size 2`", flags=("--data-parallel-size", "2")),
)


@cache
def outlooks(device: str) -> list[tuple[Deployment, Outlook]]:
    """What is foreseen for each deployment on a device."""
    rows = [one for one in DEPLOYMENTS if device in one.devices]
    answers = ask(device, CONFIGS, [(one.model, *one.flags) for one in rows])
    return [(row, answer.outlook) for row, answer in zip(rows, answers, strict=True)]


# -- the page ------------------------------------------------------------------------------------


def section_lines() -> Iterator[str]:
    """The tables in Markdown, and below them the reasons in the engine's own words."""
    notes: dict[str, int] = {}
    for device, heading in (
        (GPU, "On a GPU, as predicted for an NVIDIA H100"),
        (CPU, "On a CPU"),
    ):
        yield f"\n## {heading}\n"
        yield from table_lines(outlooks(device), notes)
    yield "\n## Why a part is off\n"
    yield "In the words of the engine's log:\n"
    for reason, number in notes.items():
        yield f"{number}. {reason}"


def table_lines(rows: Sequence[tuple[Deployment, Outlook]], notes: dict[str, int]) -> Iterator[str]:
    """One table. Numbers each reason in `notes` when it is first met."""
    names = [part.name for part in rows[0][1].parts]
    yield f"| deployment | runner, scheduling | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for deployment, outlook in rows:
        how = f"{outlook.model_runner}, {'asynchronous' if outlook.is_async else 'synchronous'}"
        cells = (_cell(part, notes) for part in outlook.parts)
        yield f"| {deployment.name} | {how} | {' | '.join(cells)} |"


def _cell(part: PartOutlook, notes: dict[str, int]) -> str:
    if part.state is not State.OFF:
        return "checked" if part.state is State.CHECKED else "on"
    return f"off ({notes.setdefault(part.reason, len(notes) + 1)})"


# -- the README ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A row of the README's table.

    Attributes:
        deployments: names of rows of the page, which have the same parts.
        tests: vLLM's model runners on which this project's tests run it, on a CPU; written by hand
            from docs/server.md.
    """

    name: str
    deployments: tuple[str, ...]
    tests: str


SUMMARIES = (
    Summary(
        "Llama, Qwen3, ... (full attention)",
        ("full attention (Llama, Qwen3, ...), vLLM's defaults",),
        "V1, V2",
    ),
    Summary(
        "the same with EAGLE 3, MTP, n-grams or a draft model",
        ("EAGLE 3", "MTP (GLM-4.5)", "n-gram speculation", "draft model"),
        "V1, V2 (MTP: V1)",
    ),
    Summary(
        "the same with LoRA, tensor parallelism or KV events",
        ("LoRA: `--enable-lora`", "`--tensor-parallel-size 2`", "KV events: `--kv-events-config`"),
        "V1",
    ),
    Summary(
        "the same with `--kv-offloading-size`",
        ("KV connector: `--kv-offloading-size`",),
        "V1, with a test worker",
    ),
    Summary("the same with `--pipeline-parallel-size 2`", ("`--pipeline-parallel-size 2`",), "V1"),
    Summary(
        "gpt-oss, Gemma 3 and 4, Llama 4 (windows or chunks)",
        (
            "sliding window in some layers: gpt-oss",
            "sliding window in some layers: Gemma 3",
            "sliding window with smaller blocks: Gemma 4",
            "chunked local attention: Llama 4",
        ),
        "V1",
    ),
    Summary(
        "gpt-oss with EAGLE 3 or n-grams",
        ("EAGLE 3 with windows: gpt-oss", "n-gram speculation with windows: gpt-oss"),
        "V1",
    ),
    Summary(
        "DeepSeek V3, Kimi K2 (MLA; CPUs without AMX)",
        ("MLA: DeepSeek V3, Kimi K2", "MLA without AMX: `--attention-backend CPU_MLA`"),
        "V1",
    ),
    Summary(
        "Qwen3-Next (recurrent layers)",
        ("recurrent hybrid: Qwen3-Next",),
        "V1, V2",
    ),
    Summary(
        "Qwen3-Next with n-grams",
        ("n-gram speculation with recurrent layers: Qwen3-Next",),
        "not tested",
    ),
    Summary(
        "Qwen3-Next with KV events",
        ("KV events with recurrent layers: Qwen3-Next",),
        "V1, V2, with a test worker",
    ),
    Summary(
        "Qwen3-Next with `--kv-offloading-size`",
        ("KV connector with recurrent layers: Qwen3-Next",),
        "not tested",
    ),
    Summary(
        "mixture of experts with `--data-parallel-size 2`",
        ("mixture of experts, `--data-parallel-size 2`",),
        "not tested",
    ),
    Summary("Mistral 7B v0.1", ("sliding window in all layers: Mistral 7B",), "not tested"),
)


def summary_lines() -> Iterator[str]:
    """The README's table in Markdown."""
    yield ""
    yield "| your server | parts on a GPU | parts on a CPU | tests |"
    yield "| --- | --- | --- | --- |"
    for row in SUMMARIES:
        cells = [row.name, *(common_parts(row, device) for device in (GPU, CPU)), row.tests]
        yield f"| {' | '.join(cells)} |"


def common_parts(row: Summary, device: str) -> str:
    """The cell of a row on a device. ValueError if the row's deployments have different parts."""
    found = {
        parts_in_words(one.parts)
        for deployment, one in outlooks(device)
        if deployment.name in row.deployments
    }
    if len(found) > 1:
        raise ValueError(f"{row.name}, on a {device}: {found}")
    return found.pop() if found else "does not start"


def parts_in_words(parts: Sequence[PartOutlook]) -> str:
    """Which parts are on, and whether any of them is checked."""
    off = [f"`{part.name}`" for part in parts if part.state is State.OFF]
    on = f"all but {', '.join(off)}" if off else "all"
    is_checked = any(part.state is State.CHECKED for part in parts)
    return f"{on}; checked at start" if is_checked else on


SECTIONS = (
    GeneratedSection(
        page=ROOT / "docs" / "coverage.md",
        command="make coverage",
        source="the parts' own answers",
        lines=section_lines,
    ),
    GeneratedSection(
        page=ROOT / "README.md",
        command="make coverage",
        source="the parts' own answers",
        lines=summary_lines,
    ),
)


if __name__ == "__main__":
    sys.exit(max(section.main() for section in SECTIONS))
