"""The tokens of a request's prompt as the engine will have them, before it is sent there.

Needs `transformers`, and the model's tokenizer on this machine. Where vLLM would render otherwise
(images, a template of the server's own), hits are found as far as both agree, and nothing breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_vllm.routing.prompts import Renderer


def renderer_of(tokenizer: str) -> Renderer:
    """Of a model's folder or name. Takes a second; then 1 ms for some thousand tokens."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def render(body: Mapping[str, Any]) -> Sequence[int]:
        if messages := body.get("messages"):
            ids: list[int] = loaded.apply_chat_template(
                list(messages),
                tools=body.get("tools") or None,
                add_generation_prompt=body.get("add_generation_prompt") is not False,
                continue_final_message=bool(body.get("continue_final_message")),
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
            return ids
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[0]
        special = body.get("add_special_tokens") is not False
        ids = loaded(text, add_special_tokens=special).input_ids
        return ids

    return render
