"""Programs by what they are doing, and how agents take turns, in words.

Owns no counts: those are the server's.
"""

from __future__ import annotations

from sgl_vllm.commands.client import Json
from sgl_vllm.commands.terminal import age, plural, printable

STATES = {
    "running": "running",
    "in_tool": "in a tool",
    "waiting_for_person": "waiting for a person",
    "unknown": "unknown (one request so far)",
    "ended": "ended",
}
"""By their keys in `/v1/sgl/stats`."""

MEANINGS = """\
A program is "waiting for a person" if its last answer calls no tool: a chat
between two turns, or a program that has finished. It is "unknown" if this is
its first answer: the server cannot tell whether another request will continue
it. Most one-off requests stay in this state.

While agents evict each other's contexts, they take turns, and one more line
says how many of their requests are held back, and for how long.
"""
"""What the states that the server infers mean, and what one more line is about, for
`--help`."""


def counts_in_words(counts: Json) -> str:
    """How many programs are in each state, such as "2 running, 1 in a tool"; empty if there is no
    program."""
    return ", ".join(f"{counts[key]:,} {name}" for key, name in STATES.items() if counts.get(key))


def tools_in_words(programs: Json) -> str:
    """For how long contexts have waited for a tool, and for which, as far as the server says so;
    empty if none does."""
    longest_s = programs.get("longest_in_tool_s")
    if longest_s is None:
        return ""
    tools = [
        f"{printable(tool['name'])} {tool['num_contexts']:,} (up to {_duration(tool['longest_s'])})"
        for tool in programs.get("tools", ())
    ]
    return ", ".join(tools) or f"up to {_duration(longest_s)}"


def turns_in_words(admission: Json) -> str:
    """For how long agents have taken turns, and what that does, or how far they are from it; empty
    if they have recomputed nothing."""
    again = admission.get("again_per_new")
    if not again:
        return ""
    recomputed = f"{again:.2g} tokens recomputed per new one"
    if not admission["holding_s"]:
        return f"agents do not take turns: {recomputed}"
    return (
        f"agents have taken turns for {_duration(admission['holding_s'])}: "
        f"{plural(admission['held'], 'request')} held back, for up to {admission['hold_s']:.2g} s "
        f"each; {recomputed}; "
        f"{admission['kept_tokens']:,} cached tokens read while taking turns, since start"
    )


def context_in_words(context: Json) -> str:
    """What the program of a context is doing, and since when."""
    tool = f" ({printable(context['tool'])})" if context.get("tool") is not None else ""
    state = STATES.get(context["state"], STATES["unknown"])
    return f"{state}{tool} for {_duration(context['paused_s'])}"


def _duration(seconds: float) -> str:
    return age(max(seconds, 1.0))
