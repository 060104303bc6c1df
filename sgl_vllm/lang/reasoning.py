"""What a model thought, apart from what it answered.

Owns where the reasoning of each family of models begins and ends in its text. Splits text that is
complete; knows nothing of programs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`. With `opened`, the chat template has already
    written `begin`, and a text without it begins inside the reasoning."""

    begin: str
    end: str
    opened: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer, each without surrounding white space.

        A text whose reasoning does not end (it was cut off) is all reasoning, and so is what stands
        before an `end` without a `begin`: the chat template has written that.
        """
        thought, ended, answer = text.partition(self.end)
        before, begun, inside = thought.partition(self.begin)
        if not begun:
            if not self.opened and not ended:
                return "", text
            before, inside = "", thought
        return inside.strip(), (before + answer).strip()

    def begun(self, text: str) -> str:
        """What is certain of the answer while `text` still grows: the answer of every longer text
        begins with it. Nothing before the reasoning has ended."""
        return self.split(text)[1] if self.end in text else ""


_THINK = ReasoningFormat("<think>", "</think>")
_THINK_OPENED = ReasoningFormat("<think>", "</think>", opened=True)

FORMATS = {
    "deepseek-r1": _THINK_OPENED,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_OPENED,
    "step3": _THINK_OPENED,
}


def reasoning_format(model_type: str) -> ReasoningFormat:
    """The format of a family of models. ValueError for a family that is not known."""
    found = FORMATS.get(model_type.lower())
    if found is None:
        raise ValueError(f"model_type must be one of {', '.join(FORMATS)}, not {model_type!r}")
    return found
