"""Prompts without roles for services that accept only chats, as SGLang sends them."""

from __future__ import annotations

from sgl_vllm.lang.backends.base import ChatPrompt, Message, Prompt, TextPrompt


def as_user_turn(prompt: Prompt) -> Prompt:
    """`prompt`; without roles, as one user turn that the assistant is to answer."""
    if isinstance(prompt, TextPrompt):
        return ChatPrompt((Message("user", prompt.text),), "generate")
    return prompt
