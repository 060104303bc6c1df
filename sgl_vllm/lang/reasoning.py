"""Splits a model's reasoning from its answer.

Owns the markers of each model family. Knows nothing of programs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning is between `begin` and `end`. If `opened`, the chat template has already written
    `begin`, so a text without it starts inside the reasoning."""

    begin: str
    end: str
    opened: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer, each without surrounding whitespace.

        A text that was cut off inside the reasoning is all reasoning. Text before an `end` without
        a `begin` is reasoning, too: the chat template wrote the `begin`.
        """
        thought, ended, answer = text.partition(self.end)
        before, begun, inside = thought.partition(self.begin)
        if not begun:
            if not self.opened and not ended:
                return "", text
            before, inside = "", thought
        return inside.strip(), (before + answer).strip()

    def begun(self, text: str) -> str:
        """The answer so far, while `text` still grows: every longer text's answer begins with it.
        Empty until the reasoning has ended."""
        return self.split(text)[1] if self.end in text else ""


_THINK = ReasoningFormat("<think>", "</think>")
_THINK_OPENED = ReasoningFormat("<think>", "</think>", opened=True)

FORMATS = {
    "deepseek-r1": _THINK_OPENED,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    # The channels' names, as they are left when the server does not return special tokens.
    "gpt-oss": ReasoningFormat("analysis", "assistantfinal"),
    "interns1": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax": _THINK_OPENED,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_OPENED,
    "step3": _THINK_OPENED,
    "step3p5": _THINK_OPENED,
}


def reasoning_format(model_type: str) -> ReasoningFormat:
    """The format of a model family. ValueError for an unknown one."""
    found = FORMATS.get(model_type.lower())
    if found is None:
        raise ValueError(f"model_type must be one of {', '.join(FORMATS)}, not {model_type!r}")
    return found
