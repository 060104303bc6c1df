"""The tokens of a request's prompt as the engine will have them, before it is sent there.

Owns the bounds on this work: it runs in a thread beside the event loop, for prompts of a bounded
size, and a request waits for it for a bounded time. A request beyond a bound is routed without its
prompt. Needs `transformers`, and the model's tokenizer on this machine. Where vLLM would render
differently (images, a template of the server's own), hits are found as far as both agree.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any  # Any: the JSON of a request; a tokenizer has no types

from sgl_vllm.routing.prompts import Body, as_body, chat_text

MAX_CHARACTERS = 2_000_000
"""Of a prompt that is rendered."""

MAX_VALUE_CHARACTERS = 1000
"""Of a text that a request gives to the chat template."""

MAX_PENDING = 64
"""Prompts that are being rendered or wait for it. There is one thread, because a tokenizer is not
safe to use from several. A thread cannot be ended, so a slow prompt keeps it until it is done."""

TIMEOUT_S = 1.0
"""How long a request waits for its prompt to be rendered."""

RESERVED = frozenset({"messages", "tools", "documents", "bos_token", "eos_token"})
"""Names that templates use and requests cannot set."""


class NotRendered(Exception):
    """The prompt is beyond a bound, or its template failed."""


class PromptRenderer:
    """Renders and tokenizes prompts with one model's tokenizer.

    Args:
        tokenizer: the model's folder or name. Loading it takes a second.
    """

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._template_names = _names_of_template(self._tokenizer)
        self._thread = ThreadPoolExecutor(1, "sgl-render")
        self._num_pending = 0

    async def tokens(self, request: object) -> Sequence[int] | None:
        """The tokens of a request's text prompt or messages; None if it has neither.

        Some milliseconds for a long prompt, almost none of them on the event loop.

        Raises:
            NotRendered: the message does not quote the prompt.
        """
        body = as_body(request)
        size = _num_characters(body)
        if size is None:
            return None
        if size > MAX_CHARACTERS:
            raise NotRendered(f"more than {MAX_CHARACTERS:,} characters")
        if self._num_pending >= MAX_PENDING:
            raise NotRendered(f"{MAX_PENDING} other prompts are being rendered")
        self._num_pending += 1
        running = self._thread.submit(self.render, body)
        running.add_done_callback(partial(self._done, asyncio.get_running_loop()))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), TIMEOUT_S)
        except TimeoutError:
            raise NotRendered(f"longer than {TIMEOUT_S:g} s") from None
        except Exception as error:
            raise NotRendered(type(error).__name__) from None

    def _done(self, loop: asyncio.AbstractEventLoop, running: Future[Sequence[int]]) -> None:
        """Called in the thread, or when a prompt that still waits is dropped."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._forget_one)

    def _forget_one(self) -> None:
        self._num_pending -= 1

    def render(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The same without bounds, in this thread. Errors are those of the template."""
        if messages := body.get("messages"):
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages),
                tools=body.get("tools") or None,
                add_generation_prompt=body.get("add_generation_prompt") is not False,
                continue_final_message=bool(body.get("continue_final_message")),
                return_dict=False,
                **self._template_values(body.get("chat_template_kwargs")),
            )
            return ids
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[0]
        special = body.get("add_special_tokens") is not False
        ids = self._tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def _template_values(self, given: object) -> dict[str, Any]:
        """What of `chat_template_kwargs` reaches the template: plain values of the names that it
        uses. Never an argument of `apply_chat_template` itself, such as another template."""
        if not isinstance(given, Mapping):
            return {}
        return {
            name: value
            for name, value in given.items()
            if name in self._template_names and _is_plain(value)
        }


def _names_of_template(tokenizer: Any) -> frozenset[str]:
    """The variables of the model's chat templates that a request may set."""
    import jinja2
    import jinja2.ext
    import jinja2.meta

    templates = tokenizer.chat_template or ()
    if isinstance(templates, str):
        templates = [templates]
    elif isinstance(templates, Mapping):
        templates = list(templates.values())
    environment = jinja2.Environment(
        extensions=[jinja2.ext.loopcontrols, "jinja2.ext.do"], autoescape=False
    )
    names: set[str] = set()
    for template in templates:
        try:
            parsed = environment.parse(template)
        except jinja2.TemplateSyntaxError:  # tags of transformers' own: no values from requests
            continue
        names |= jinja2.meta.find_undeclared_variables(parsed)
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    return frozenset(names - arguments - RESERVED)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_VALUE_CHARACTERS
    return value is None or isinstance(value, bool | int | float)


def _num_characters(body: Body) -> int | None:
    """Of what there is to render. None if there is nothing."""
    if messages := body.get("messages"):
        return len(chat_text(messages, body.get("tools")))
    prompt = body.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = prompt[0] if prompt else None
    return len(prompt) if isinstance(prompt, str) else None
