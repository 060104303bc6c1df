"""Every option of the server plugin, declared once.

An option is one field of `Options`: its default, help text, part, choices and bounds. Validation,
error messages, `vllm serve --help` and the tables in docs/options.md all come from that
declaration. Imports no vLLM, so a bad option is refused before an engine starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar  # Any: options before they are checked

from sgl_vllm.protocol.request_keys import WHITESPACES
from sgl_vllm.spelling import did_you_mean

CONFIG_ENV = "SGL_VLLM_CONFIG"
CONFIG_KEY = "sgl_vllm"
"""The plugin's key in vLLM's `additional_config`, where options travel to the engine's process."""

REMOVED = {
    "approximate_choice": "no choice was measurably better. Leave it out",
    "radix_slot_copy": "no gain of it was ever measured. Leave it out: vLLM copies whole blocks",
    "schedule_cheapest_victim": "it gained no throughput. Leave it out",
    "schedule_max_passes": "it is called schedule_max_overtakes",
    "unverified": "it is called self_check. Write self_check=off for unverified=true",
}
"""Removed options, and why they were removed, for the message that refuses them."""

ALL_OPTIONS = "; vllm serve --help=plugin-config lists the options"

Value = TypeVar("Value", bool, int, float, str)


class OptionError(ValueError):
    """An unknown option, or a value that an option does not accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """The declaration of one option, beyond its name, type and default.

    Attributes:
        help: one or two sentences for `--help` and docs/options.md. May use backticks.
        heading: above this option and those that follow, up to the next heading.
        choices: the accepted values, each with a description or "". A function, so that a registry
            is imported only when an option is checked or listed. None if any value of the type
            and bounds will do.
        minimum, maximum: bounds of a number, both inclusive.
        pattern: the form of a text that has no fixed set of values, as a regular expression.
        form: the same in words, for the message about a value that is refused.
        hint: what to do instead, at the end of the message about a value that is refused.
        page: the page in docs/ with more.
    """

    help: str
    heading: str = ""
    choices: Callable[[], Mapping[str, str]] | None = None
    minimum: float = 0.0
    maximum: float = math.inf
    pattern: str = ""
    form: str = ""
    hint: str = ""
    page: str = ""

    @staticmethod
    def of(field: dataclasses.Field[Any]) -> OptionInfo:
        info = field.metadata["option"]
        assert isinstance(info, OptionInfo)
        return info


def _option(default: Value, help: str, **declared: Any) -> Value:  # Any: see `OptionInfo`
    """A dataclass field. Typed as its default, as `dataclasses.field` is."""
    info = OptionInfo(help=help, **declared)
    made: Value = dataclasses.field(default=default, metadata={"option": info})
    return made


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

    radix: bool = _option(
        True,
        "Find cached prefixes to the token, where stock vLLM finds whole blocks. Finished requests "
        "leave their last, partial block in the cache.",
        heading="Prefix cache",
        page="cache.md",
    )
    radix_policy: str = _option(
        "lru",
        "Which cached prefixes are evicted first.",
        choices=_eviction_policies,
        page="cache.md",
    )
    radix_ttl_s: float = _option(
        0.0,
        "Expire prefixes that no request has used for this many seconds. 0 means never.",
    )
    radix_pin_share: float = _option(
        0.25,
        "The largest share of the cache that can be pinned.",
        maximum=1.0,
        page="cache.md",
    )
    radix_keep_share: float = _option(
        0.25,
        "The largest share of the cache that the prefixes which one tenant's requests ask to keep "
        "can hold. 0 ignores these requests.",
        maximum=1.0,
        page="cache.md",
    )
    radix_max_pins: int = _option(1000, "The largest number of pins at a time.", page="cache.md")
    cached_tokens_in_usage: bool = _option(
        True,
        "Report cached prompt tokens in the `usage` of every answer of `vllm serve`, as with "
        "`--enable-prompt-tokens-details`.",
        page="cache.md",
    )
    tenant_from: str = _option(
        "none",
        "What names a request's tenant, so that tenants share no cached prefix: `api_key`, or "
        "`header:NAME` for a header that your gateway sets. The server derives the `cache_salt` "
        "from it.",
        pattern=r"none|api_key|header:[A-Za-z0-9-]+",
        form="none, api_key or header:NAME",
        page="cache.md",
    )
    tree_text: bool = _option(
        False,
        "Show the text of cached prompts, and the names of tools, at `/v1/sgl/tree` to every "
        "client with the server's API key, except for requests with a `cache_salt`.",
        page="cache.md",
    )
    why_exact: bool = _option(
        False,
        "Explain to every client with the server's API key, to the token, which prompt tokens of a "
        "request were not cached, and why (`/v1/sgl/why`), and count cached tokens in `usage` and "
        "`/v1/sgl/match` to the token. If off, requests with a `cache_salt` get this, and others "
        "get numbers in whole blocks. `tree_text` implies it. It is on if the server has a "
        "loopback `--host` and no API key, unless you set this option or `tenant_from`.",
        page="operations.md",
    )
    why_evicted_mb: float = _option(
        16.0,
        "Host memory, in MiB, for token ids of evicted prefixes, so that `/v1/sgl/why` can name "
        "evictions. Each evicted sequence takes 600 bytes and 4 per token. With 0, evicted "
        "tokens count as never cached.",
        page="operations.md",
    )
    prompt_logprobs_mb: float = _option(
        64.0,
        "Host memory, in MiB, for log-probabilities of cached prompts (`prompt_logprobs`, and "
        "`echo` with `logprobs`), so that they are not computed again. Each token takes 12 bytes "
        "and 8 per likely token. With 0, such requests compute their whole prompt.",
        page="server.md",
    )
    prefix_attention: bool = _option(
        False,
        "On a GPU, decode steps read the blocks that their requests share once for all of them, "
        "where that pays. Other steps run FlashAttention as before.",
        page="gpu.md#kernels",
    )
    approximate_reuse: bool = _option(
        False,
        "Let requests reuse the KV of segments that was computed at another place in another "
        "prompt, if they ask for it. Their answers are not exact. Other requests are not affected.",
        page="approximate-reuse.md",
    )
    approximate_recompute: float = _option(
        0.15,
        "The share of each reused segment's tokens, from its first token on, that is computed in "
        "its new place. With 1, nothing is reused.",
        maximum=1.0,
        page="approximate-reuse.md",
    )
    select: bool = _option(
        True,
        "Let requests for prompt log-probabilities read the prefix from the cache. Stock vLLM "
        "computes it again for each choice of a `select`.",
        page="server.md",
    )
    tier_rule: str = _option(
        "measured",
        "When to load KV that a KV connector holds below the GPU.",
        heading="Tiers below the GPU",
        choices=lambda: {
            "measured": "where loading is measured to be cheaper than computing",
            "always": "wherever it is found",
        },
        page="cache.md#below-the-gpu",
    )
    tier_min_tokens: int = _option(
        0, "Never load fewer tokens than this.", page="cache.md#below-the-gpu"
    )
    schedule: bool = _option(
        True,
        "Reorder waiting requests by what the cache holds, when they do not all fit into it.",
        heading="Scheduling and routing",
        page="scheduling.md",
    )
    schedule_policy: str = _option(
        "lpm",
        "The order in which waiting requests are admitted.",
        choices=_admission_orders,
        page="scheduling.md",
    )
    schedule_max_overtakes: int = _option(
        1000,
        "Admit a request next once this many later requests have been admitted before it, or once "
        "`schedule_max_delay` is reached, whichever comes first.",
        page="scheduling.md",
    )
    schedule_max_delay: float = _option(
        0.05,
        "Admit a request next once the later requests admitted before it cost this share of the "
        "backlog, and at least 512 tokens. The backlog is the most tokens that had to be computed "
        "for waiting requests at one time of its wait: of 100,000, a share of 0.05 is 5,000.",
        page="scheduling.md",
    )
    schedule_max_wait_s: float = _option(
        0.0,
        "Admit a request next once it has waited this many seconds, in addition to the two limits "
        "above. 0 means no limit.",
    )
    schedule_hold_s: float = _option(
        0.0,
        "Hold a request back for at most this many seconds while it would evict contexts that, by "
        "the pauses measured so far, will likely be continued within this time. For agents whose "
        "sessions do not fit into the cache together. 0 turns it off.",
        page="scheduling.md",
    )
    schedule_window: int = _option(
        1024,
        "How many waiting requests are reordered, oldest first. The rest keep their order of "
        "arrival.",
        minimum=1,
        hint="schedule=false turns reordering off",
    )
    schedule_fair_quantum: int = _option(
        0,
        "Share the engine fairly between tenants (`cache_salt` and LoRA adapter): a tenant that is "
        "this many computed tokens ahead of another waiting tenant goes last. 0 turns it off.",
        page="scheduling.md",
    )
    rank_routing: bool = _option(
        True,
        "With `--data-parallel-size`, send a request to the engine where it costs the least "
        "compute and waiting. Off, requests go to the engine with the fewest requests.",
        page="routing.md#several-engines-in-one-server",
    )
    max_body_mb: float = _option(
        64.0,
        "The largest body of any request to the server, in MiB. It refuses larger ones with status "
        "413, unread. 8 is enough if clients send no images, audio or video; 0 means no limit.",
        heading="Structured output and jump-forward",
        page="structured-output.md",
    )
    fsm: bool = _option(
        True,
        "Mask structured output with the plugin's own automata, for the formats that they "
        "support. Other formats use vLLM's backends.",
        page="structured-output.md",
    )
    schema_reading: str = _option(
        "stock",
        "What a JSON schema means.",
        choices=lambda: {
            "stock": "as in the backend that the server would use without the plugin",
            "spec": "as the JSON Schema specification says; schemas that cannot be enforced are "
            "refused",
        },
        page="structured-output.md",
    )
    tools_and_format: bool = _option(
        False,
        "Answer requests with `tools` and a JSON `response_format` with calls or with a document. "
        "If off, only requests that ask for it, as vLLM's grammar often drops the tools.",
        page="structured-output.md#tools-and-a-format",
    )
    json_whitespace: str = _option(
        "stock",
        "The whitespace of JSON, unless a request names its own (`sgl_whitespace`).",
        choices=lambda: {"stock": "as vLLM's `disable_any_whitespace` says", **WHITESPACES},
        page="structured-output.md#whitespace",
    )
    jump_forward: bool = _option(
        True,
        "Append the text that a grammar forces in one forward pass, not token by token.",
        page="structured-output.md#jump-forward",
    )
    jump_mode: str = _option(
        "canonical",
        "What counts as forced.",
        choices=lambda: {
            "canonical": "text with only one continuation, tokenized as the tokenizer would",
            "exact": "a token that is the only legal one, so that jumps never change greedy output",
        },
        page="structured-output.md#jump-forward",
    )
    jump_graph_tokens: int = _option(
        16,
        "On vLLM's V2 model runner, capture full CUDA graphs for rows of at most this many tokens, "
        "if the attention backend allows it, as FlashAttention 3 does. 0 captures none.",
        page="structured-output.md#cuda-graphs",
    )
    jump_graph_batch: int = _option(
        256,
        "The largest pass, in tokens, that gets such a graph.",
        page="structured-output.md#cuda-graphs",
    )
    self_check: str = _option(
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


def words_to_mapping(words: Sequence[str], source: str = "--plugin-config") -> dict[str, Any]:
    """Names and values of command-line words: JSON objects and `key=value` pairs, whose values are
    read as JSON. Later ones win.

    Args:
        source: where the words come from, for the message of an error.

    Raises:
        OptionError: a word has neither form.
    """
    values: dict[str, Any] = {}
    malformed: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if word.lstrip().startswith("{"):
            try:
                values.update(json.loads(word))
            except ValueError as error:
                raise OptionError(f"{source}: {word!r} is not valid JSON: {error}") from None
            except RecursionError:
                raise OptionError(f"{source}: the JSON is nested too deeply") from None
        elif not (name and equals):
            malformed.append(repr(word))
        else:
            values[name] = _value_of(text)
    if malformed:
        raise OptionError(
            f"{source} takes a JSON object or key=value pairs, not {' '.join(malformed)}; write "
            "jump_forward=false, for example"
        )
    return values


def _value_of(text: str) -> Any:
    """The value of text in JSON, or of Python's `True` and `False`; other text is a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


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
        elif problem := _problem(fields[name], value):
            hint = OptionInfo.of(fields[name]).hint
            problems.append(f"{name} {problem}" + (hint and f"; {hint}"))
    if problems:
        raise OptionError("\n".join(problems))


def _problem(field: dataclasses.Field[Any], value: object) -> str | None:
    """Why `value` is not accepted, to follow the option's name. None if it is."""
    info = OptionInfo.of(field)
    if isinstance(field.default, bool):
        return None if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if info.choices is not None:
        choices = info.choices()
        if isinstance(value, str) and value in choices:
            return None
        near = did_you_mean(value, choices)
        return f"must be one of {', '.join(choices)}, not {value!r}{near}"
    if info.pattern:
        is_of_form = isinstance(value, str) and re.fullmatch(info.pattern, value)
        return None if is_of_form else f"must be {info.form}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number, not {value!r}"
    if isinstance(field.default, int) and not isinstance(value, int):
        return f"must be a whole number, not {value!r}"
    if not math.isfinite(value) or value < info.minimum:
        return f"must be at least {info.minimum:g}, not {value!r}"
    if value > info.maximum:
        return f"must be at most {info.maximum:g}, not {value!r}"
    return None
