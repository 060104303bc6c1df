"""Every option of the server plugin, as one typed object.

Options come from `--plugin-config`, from the environment variable `SGL_VLLM_CONFIG`, or from
`additional_config={"sgl_vllm": {...}}`, and travel to the engine's process in the last of these.
No vLLM here: a bad option is refused before an engine starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIG_ENV = "SGL_VLLM_CONFIG"
CONFIG_KEY = "sgl_vllm"
"""The plugin's place in vLLM's `additional_config`."""


SCHEDULE_POLICIES = ("lpm", "dfs-weight", "fcfs", "random")
_CHOICES = {
    "radix_policy": ("lru", "lfu", "slru", "priority"),
    "tier_rule": ("measured", "always"),
    "schedule_policy": SCHEDULE_POLICIES,
    "jump_mode": ("canonical", "exact"),
    "schema_reading": ("stock", "spec"),
}


class OptionError(ValueError):
    """An option that does not exist, or a value that it cannot take."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the plugin does. Each of the first five parts can be switched off by itself.

    Attributes:
        radix: token-granular prefix cache; finished requests keep their last, partial block.
        schedule: waiting requests in an order that makes the most of the cache.
        fsm: masks of structured output from automata of our own, where a format is regular enough;
            otherwise, and without it, from stock's backends.
        jump_forward: text that a grammar forces enters in one forward pass.
        select: prompt scores (`prompt_logprobs`) may read the prefix from the cache.
        radix_policy: what the cache gives up first: lru, lfu, slru (what was never hit goes first)
            or priority (what only unimportant requests used goes first).
        radix_ttl_s: forget what nobody has used for so many seconds; 0 for never.
        radix_pin_share: at most this share of the cache can be pinned (0 to 1).
        radix_slot_copy: on a GPU, a hit inside a block copies its matched slots by one kernel for
            all layers, not the whole block layer by layer.
        prefix_attention: on a GPU, decode steps whose requests share cached blocks read these once
            for all of them, where that pays; other steps are FlashAttention's as before.
        tier_rule: what a KV connector has below the GPU is loaded where that is measured to be
            cheaper than computing it again (measured), or wherever it is found (always).
        tier_min_tokens: and never fewer tokens than this.
        tree_text: show the text of cached prompts at `/v1/sgl/tree`, but of no tenant with a
            `cache_salt`. Everyone with the server's API key can read it then.
        schedule_policy: lpm (longest cached prefix first), dfs-weight (depth first over the tree,
            to where most wait), fcfs (first come, first served) or random.
        schedule_max_passes: who was overtaken by so many later requests goes first.
        schedule_max_delay: so does one whom later requests have delayed by this share of the
            largest backlog that it has seen, in tokens to compute.
        schedule_max_wait_s: so does one that has waited so long (seconds); 0 for no such limit.
        schedule_window: at most so many waiting requests, the oldest, are put in order.
        schedule_fair_quantum: share the machine fairly between tenants (`cache_salt`, adapter): who
            has had this many computed tokens more than others that wait goes last; 0 for no such
            rule.
        schedule_cheapest_victim: when the cache is full, preempt who loses the fewest computed
            tokens, not the newest.
        jump_mode: what counts as forced. canonical: text, in its canonical spelling; exact: only
            tokens that are the one legal next token, so that output is stock's to the token.
        rank_routing: with `--data-parallel-size`, a request goes to the rank where it has the least
            to compute and to wait for; otherwise to where the fewest requests are.
        schema_reading: what a JSON schema means. stock: as the backend that the server would have
            without the plugin; spec: as its specification says, and what cannot be had of it is
            refused.
        unverified: jump_forward and select also where no GPU has run them yet: with asynchronous
            scheduling, and on vLLM's V2 model runner.
    """

    radix: bool = True
    schedule: bool = True
    fsm: bool = True
    jump_forward: bool = True
    select: bool = True
    radix_policy: str = "lru"
    radix_ttl_s: float = 0.0
    radix_pin_share: float = 0.25
    radix_slot_copy: bool = False
    prefix_attention: bool = False
    tier_rule: str = "measured"
    tier_min_tokens: int = 0
    tree_text: bool = False
    schedule_policy: str = "lpm"
    schedule_max_passes: int = 1000
    schedule_max_delay: float = 0.05
    schedule_max_wait_s: float = 0.0
    schedule_window: int = 1024
    schedule_fair_quantum: int = 0
    schedule_cheapest_victim: bool = False
    jump_mode: str = "canonical"
    rank_routing: bool = True
    schema_reading: str = "stock"
    unverified: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise OptionError(f"{field.name} takes true or false, not {value!r}")
            elif field.name in _CHOICES:
                if value not in _CHOICES[field.name]:
                    choices = ", ".join(_CHOICES[field.name])
                    raise OptionError(f"{field.name} is one of {choices}, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(f"{field.name} takes a number, not {value!r}")
            elif isinstance(field.default, int) and not isinstance(value, int):
                raise OptionError(f"{field.name} takes a whole number, not {value!r}")
            elif not math.isfinite(value) or value < 0:
                raise OptionError(f"{field.name} cannot be {value!r}: it is 0 or more")
        if self.radix_pin_share > 1:
            raise OptionError(f"radix_pin_share is at most 1, not {self.radix_pin_share!r}")
        if self.schedule_window < 1:
            raise OptionError(
                "schedule_window is at least 1; schedule=false is the way to have none"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Options:
        """From names and values.

        Raises:
            OptionError: names the option and what it could have been.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise OptionError(
                    f"sgl-vllm has no option {name!r}: {hint}the options are {', '.join(names)}"
                )
        return cls(**values)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Options:
        """From command-line words: JSON objects and `key=value` pairs; later ones win.

        A value is read as JSON (`false`, `12`, `0.5`).

        Raises:
            OptionError: as for `from_mapping`, or if a word is neither form.
        """
        return cls.from_mapping(words_to_mapping(words))

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of `from_mapping`."""
        return dataclasses.asdict(self)


def words_to_mapping(words: Sequence[str]) -> dict[str, Any]:
    """Command-line words to names and values; see `Options.from_words`."""
    values: dict[str, Any] = {}
    for word in words:
        if word.lstrip().startswith("{"):
            try:
                part = json.loads(word)
            except json.JSONDecodeError as error:
                raise OptionError(f"--plugin-config {word!r} is not valid JSON: {error}") from None
            values.update(part)
            continue
        name, equals, text = word.partition("=")
        if not equals:
            raise OptionError(
                f"--plugin-config takes a JSON object or key=value pairs, not {word!r}"
            )
        try:
            values[name] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            values[name] = text
    return values
