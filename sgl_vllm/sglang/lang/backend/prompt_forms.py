"""Prompts for services that accept only chats or only text, in the form that SGLang sends them."""

from __future__ import annotations

from sgl_vllm.lang.backends.base import ChatPrompt, Message, Prompt, TextPrompt


def as_user_turn(prompt: Prompt) -> Prompt:
    """`prompt`; without roles, as one user turn that the assistant is to answer."""
    if isinstance(prompt, TextPrompt):
        return ChatPrompt((Message("user", prompt.text),), "generate")
    return prompt


def as_text(prompt: Prompt) -> Prompt:
    """`prompt`; with roles, as text with a line for each turn, such as ``USER:Hello.``, which is
    SGLang's default chat template. A prompt with media stays as it is."""
    if isinstance(prompt, TextPrompt) or prompt.media:
        return prompt
    text = "".join(f"{message.role.upper()}:{message.text}\n" for message in prompt.messages)
    match prompt.ending:
        case "generate":
            return TextPrompt(f"{text}ASSISTANT:")
        case "continue":
            return TextPrompt(text.removesuffix("\n"))
        case "closed":
            return TextPrompt(text)
