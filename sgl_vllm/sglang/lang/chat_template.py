"""SGLang's chat templates, by name only: the server renders chats with the model's own template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatTemplate:
    """A template that SGLang would render chats with. Here it has a name and no effect."""

    name: str


def get_chat_template(name: str) -> ChatTemplate:
    """The template of this name. Any name is accepted."""
    return ChatTemplate(name)


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of a model, which is the one that its server has."""
    return ChatTemplate("default")
