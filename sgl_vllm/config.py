"""Every option of the server plugin, declared once.

An option is one field of `Options`: its default, help text, part, choices and bounds. Validation,
error messages, `vllm serve --help` and the tables in docs/options.md all come from that
declaration. Imports no vLLM, so a bad option is refused before an engine starts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: options before they are checked

from sgl_vllm.option import OptionError, OptionInfo, option, problem_of
from sgl_vllm.protocol.request_keys import WHITESPACES
from sgl_vllm.spelling import did_you_mean

CONFIG_ENV = "SGL_VLLM_CONFIG"
CONFIG_KEY = "sgl_vllm"
"""The plugin's key in vLLM's `additional_config`, where options travel to the engine's process."""

ROUNDS_KEY = "sgl_vllm_rounds"
"""Another key there, set if the engine has to round the cached tokens that clients are told."""

REMOVED = {
    "approximate_choice": "no choice was measurably better. Leave it out",
    "radix_slot_copy": "no gain of it was ever measured. Leave it out: vLLM copies whole blocks",
    "schedule_cheapest_victim": "it gained no throughput. Leave it out",
    "schedule_hold_s": "the server learns it. Leave it out, or write schedule_admission=off for 0",
    "schedule_max_passes": "it is called schedule_max_overtakes",
    "unverified": "it is called self_check. Write self_check=off for unverified=true",
}
"""Removed options, and why they were removed, for the message that refuses them."""

ALL_OPTIONS = "; vllm serve --help=plugin-config lists the options"


def _described(registry: Mapping[str, object]) -> dict[str, str]:
    """Each name of a registry with the first line of its value's docstring."""
    lines = {name: inspect.getdoc(value) or "" for name, value in registry.items()}
    return {name: line.partition("\n")[0].removesuffix(".") for name, line in lines.items()}


def _eviction_policies() -> Mapping[str, str]:
    from sgl_vllm.radix.eviction_policies import POLICIES

    return _described(POLICIES)


def _admission_orders() -> Mapping[str, str]:
    from sgl_vllm.scheduler.orders import ORDERS

    return _described(ORDERS)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one engine, all valid.

    To add one, add a field here and run `make options`.

    Raises:
        OptionError: names the option, the value and what is accepted instead.
    """

    radix: bool = option(
        True,
        "Find cached prefixes to the token, where stock vLLM finds whole blocks. Finished requests "
        "leave their last, partial block in the cache.",
        heading="Prefix cache",
        page="cache.md",
    )
    radix_policy: str = option(
        "lru",
        "Which cached prefixes are evicted first.",
        choices=_eviction_policies,
        page="cache.md",
    )
    radix_ttl_s: float = option(
        0.0,
        "Expire prefixes that no request has used for this many seconds. 0 means never.",
    )
    radix_pin_share: float = option(
        0.25,
        "The largest share of the cache that can be pinned.",
        maximum=1.0,
        page="cache.md",
    )
    radix_keep_share: float = option(
        0.25,
        "The largest share of the cache that prefixes marked by one tenant's requests can hold "
        "(`sgl_keep`, `cache_control`). With 0, marks have no effect.",
        maximum=1.0,
        page="cache.md",
    )
    radix_max_pins: int = option(1000, "The largest number of pins at a time.", page="cache.md")
    cached_tokens_in_usage: bool = option(
        True,
        "Report cached prompt tokens in the `usage` of every answer of `vllm serve`, as with "
        "`--enable-prompt-tokens-details`.",
        page="cache.md",
    )
    tenant_from: str = option(
        "none",
        "What names a request's tenant, so that tenants share no cached prefix: `api_key`, or "
        "`header:NAME` for a header that your gateway sets. The server derives the `cache_salt` "
        "from it.",
        pattern=r"none|api_key|header:[A-Za-z0-9-]+",
        form="none, api_key or header:NAME",
        page="cache.md",
    )
    tree_text: bool = option(
        False,
        "Show the text of cached prompts, and the names of tools, at `/v1/sgl/tree` to every "
        "client with the server's API key, except for requests with a `cache_salt`.",
        page="cache.md",
    )
    why_exact: bool = option(
        False,
        "Explain to every client with the server's API key, to the token, which prompt tokens of a "
        "request were not cached, and why (`/v1/sgl/why`), and count cached tokens in `usage` and "
        "`/v1/sgl/match` to the token. If off, requests with a `cache_salt` get this, and others "
        "get numbers in whole blocks. `tree_text` implies it. It is on if the server has a "
        "loopback `--host` and no API key, unless you set this option or `tenant_from`.",
        page="operations.md",
    )
    why_evicted_mb: float = option(
        16.0,
        "Host memory, in MiB, for token ids of evicted prefixes, so that `/v1/sgl/why` can name "
        "evictions. Each evicted sequence takes 600 bytes and 4 per token. With 0, evicted "
        "tokens count as never cached.",
        page="operations.md",
    )
    prompt_logprobs_mb: float = option(
        64.0,
        "Host memory, in MiB, for log-probabilities of cached prompts (`prompt_logprobs`, and "
        "`echo` with `logprobs`), so that they are not computed again. Each token takes 12 bytes, "
        "plus 8 per likely token. With 0, such requests compute their whole prompt.",
        page="server.md",
    )
    prefix_attention: bool = option(
        False,
        "On a GPU with vLLM's V2 model runner, decode steps read the blocks that their requests "
        "share once for all of them, where that pays. Other steps run FlashAttention as before.",
        page="gpu.md#kernels",
    )
    approximate_reuse: bool = option(
        False,
        "Let requests reuse the KV of segments that was computed at another place in another "
        "prompt, if they ask for it. Their answers are not exact. Other requests are not affected.",
        page="approximate-reuse.md",
    )
    approximate_recompute: float = option(
        0.15,
        "The share of each reused segment's tokens, from its first token on, that is computed in "
        "its new place. With 1, nothing is reused.",
        maximum=1.0,
        page="approximate-reuse.md",
    )
    select: bool = option(
        True,
        "Let requests for prompt log-probabilities read the prefix from the cache. Stock vLLM "
        "computes it again for each choice of a `select`.",
        page="server.md",
    )
    tier_rule: str = option(
        "measured",
        "When to load KV that a KV connector holds below the GPU.",
        heading="Tiers below the GPU",
        choices=lambda: {
            "measured": "where loading is measured to be cheaper than computing",
            "always": "wherever it is found",
        },
        page="cache.md#below-the-gpu",
    )
    tier_min_tokens: int = option(
        0, "Never load fewer tokens than this.", page="cache.md#below-the-gpu"
    )
    schedule: bool = option(
        True,
        "Reorder waiting requests by what the cache holds, when they do not all fit into it.",
        heading="Scheduling and routing",
        page="scheduling.md",
    )
    schedule_policy: str = option(
        "lpm",
        "The order in which waiting requests are admitted.",
        choices=_admission_orders,
        page="scheduling.md",
    )
    schedule_admission: str = option(
        "auto",
        "Whether agents take turns while their contexts do not fit into the cache together.",
        choices=lambda: {
            "auto": "while agents recompute more evicted tokens than they compute new ones",
            "off": "never",
        },
        page="scheduling.md#agents-that-do-not-fit-into-the-cache-together",
    )
    schedule_max_overtakes: int = option(
        1000,
        "Admit a request next once this many later requests have been admitted before it, or once "
        "`schedule_max_delay` is reached, whichever comes first.",
        page="scheduling.md",
    )
    schedule_max_delay: float = option(
        0.05,
        "Admit a request next once the later requests admitted before it cost this share of the "
        "backlog, and at least 512 tokens. The backlog is the largest number of tokens that "
        "waiting requests needed at any time of its wait: of 100,000, a share of 0.05 is 5,000. "
        "Without effect while agents take turns.",
        page="scheduling.md",
    )
    schedule_max_wait_s: float = option(
        0.0,
        "Admit a request next once it has waited this many seconds, in addition to the two limits "
        "above, and hold back no request for longer. 0 means no limit.",
    )
    schedule_window: int = option(
        1024,
        "How many waiting requests are reordered, oldest first. The rest keep their order of "
        "arrival.",
        minimum=1,
        hint="schedule=false turns reordering off",
    )
    schedule_fair_quantum: int = option(
        0,
        "Share the engine fairly between tenants (`cache_salt` and LoRA adapter): a tenant that is "
        "this many computed tokens ahead of another waiting tenant goes last. 0 turns it off.",
        page="scheduling.md",
    )
    rank_routing: bool = option(
        True,
        "With `--data-parallel-size`, send a request to the engine where it costs the least "
        "compute and waiting. Off, requests go to the engine with the fewest requests.",
        page="routing.md#several-engines-in-one-server",
    )
    max_body_mb: float = option(
        64.0,
        "The largest body of any request to the server, in MiB. Larger ones get status 413 and are "
        "not read. 8 is enough if clients send no images, audio or video; 0 means no limit.",
        heading="Structured output and jump-forward",
        page="structured-output.md",
    )
    fsm: bool = option(
        True,
        "Mask structured output with the plugin's own automata, for the formats that they "
        "support. Other formats use vLLM's backends.",
        page="structured-output.md",
    )
    schema_reading: str = option(
        "stock",
        "What a JSON schema means.",
        choices=lambda: {
            "stock": "as in the backend that the server would use without the plugin",
            "spec": "as the JSON Schema specification says; schemas that cannot be enforced are "
            "refused",
        },
        page="structured-output.md",
    )
    tools_and_format: bool = option(
        False,
        "Let requests with `tools` and a JSON `response_format` get calls or a document. "
        "If off, only those that ask for it do; for others, vLLM's grammar often drops the tools.",
        page="structured-output.md#tools-and-a-format",
    )
    json_whitespace: str = option(
        "stock",
        "The whitespace of JSON, unless a request chooses its own (`sgl_whitespace`).",
        choices=lambda: {"stock": "as vLLM's `disable_any_whitespace` says", **WHITESPACES},
        page="structured-output.md#whitespace",
    )
    jump_forward: bool = option(
        True,
        "Append the text that a grammar forces in one forward pass, not token by token.",
        page="structured-output.md#jump-forward",
    )
    jump_mode: str = option(
        "canonical",
        "What counts as forced.",
        choices=lambda: {
            "canonical": "text with only one continuation, tokenized as the tokenizer would",
            "exact": "a token that is the only legal one, so that jumps never change greedy output",
        },
        page="structured-output.md#jump-forward",
    )
    jump_graph_tokens: int = option(
        16,
        "On vLLM's V2 model runner, capture full CUDA graphs for rows of at most this many tokens, "
        "if the attention backend allows it, as FlashAttention 3 does. 0 captures none.",
        page="structured-output.md#cuda-graphs",
    )
    jump_graph_batch: int = option(
        256,
        "The largest pass, in tokens, that gets such a graph.",
        page="structured-output.md#cuda-graphs",
    )
    self_check: str = option(
        "auto",
        "Before the first request, compare each part with a reference on this device, and switch "
        "off those that disagree.",
        heading="Self-check",
        choices=lambda: {
            "auto": "on a GPU, with asynchronous scheduling, on vLLM's V2 model runner, and with "
            "methods of speculative decoding that the project does not test",
            "on": "everywhere, and again after a check that crashed the engine",
            "off": "never; every part that the model and configuration allow is on",
        },
        page="gpu.md#the-self-check",
    )

    def __post_init__(self) -> None:
        _check({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    def tells_exactly(self) -> bool:
        """Whether a client without a `cache_salt` is told of cached tokens to the token, not in
        whole blocks. A client that may read prompts has nothing to gain from guessing them."""
        return self.why_exact or self.tree_text

    @classmethod
    def from_mapping(cls, *sources: Mapping[str, Any]) -> Options:
        """From names and values; later sources win.

        Raises:
            OptionError: with a line for each unknown name and each value that is not accepted.
        """
        values = {name: value for source in sources for name, value in source.items()}
        _check(values)
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of `from_mapping`."""
        return dataclasses.asdict(self)


def choices_of(name: str) -> tuple[str, ...]:
    """The values that option `name` accepts, if it has a fixed set of them."""
    info = OptionInfo.of(Options.__dataclass_fields__[name])
    return tuple(info.choices()) if info.choices is not None else ()


def by_heading() -> dict[str, list[dataclasses.Field[Any]]]:
    """The options under each heading, in the order of their declaration."""
    found: dict[str, list[dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(Options):
        found.setdefault(OptionInfo.of(field).heading or list(found)[-1], []).append(field)
    return found


def _check(values: Mapping[str, Any]) -> None:
    """Raises OptionError, with a line for each of `values` that `Options` does not take."""
    fields = {field.name: field for field in dataclasses.fields(Options)}
    problems: list[str] = []
    for name, value in values.items():
        if name in REMOVED:
            problems.append(f"{name} was removed: {REMOVED[name]}")
        elif name not in fields:
            problems.append(f"unknown option {name}" + did_you_mean(name, fields, ALL_OPTIONS))
        elif problem := problem_of(fields[name], value):
            hint = OptionInfo.of(fields[name]).hint
            problems.append(f"{name} {problem}" + (hint and f"; {hint}"))
    if problems:
        raise OptionError("\n".join(problems))
