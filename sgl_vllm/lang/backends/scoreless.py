"""Services that generate text and have no scores: OpenAI's, Anthropic's, and those of LiteLLM.

Owns what replaces what their APIs lack: a select becomes a document that the model writes, and stop
texts that a service does not take are found on the client. Also JSON schemas for the strict mode of
OpenAI's services, in which the decoder enforces them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.requests import ChoiceAnswer, GenAnswer, Generated, GenRequest, Watch
from sgl_vllm.lang.backends.service import ServiceBackend
from sgl_vllm.lang.choices import token_length_normalized
from sgl_vllm.lang.constraints import JSON_SCHEMA
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.speculation import first_stop, without_begun_stop
from sgl_vllm.lang.usage import Usage

_NAMES_IN_GEN = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class ScorelessBackend(ServiceBackend):
    """A service that only generates text."""

    scoreless_methods = (token_length_normalized,)

    def refuse_options(self, sampling: Sampling, lacking: Mapping[str, str]) -> None:
        """Raise UnsupportedError for the first option in `lacking` that is not at its default.
        `lacking` has the advice for each option."""
        for option, advice in lacking.items():
            if option == "logprob_start_len" and not sampling.return_logprob:
                continue
            value = getattr(sampling, option)
            if value not in (None, (), getattr(DEFAULT_SAMPLING, option)):
                self.refuse(_NAMES_IN_GEN.get(option, option), advice)

    def schema_of(self, request: GenRequest) -> Json | None:
        """The JSON schema of a request, if it has one. Refuses other kinds of constraint."""
        constraint = request.constraint
        if constraint is None:
            return None
        if constraint.kind != JSON_SCHEMA:
            self.refuse(constraint.kind.shown, "use json_schema, or describe it in the prompt")
        schema: Json = constraint.value
        return schema

    def prompt_body(self, prompt: Prompt) -> Json:
        """A prompt in the form of the service's API."""
        raise NotImplementedError

    @abstractmethod
    async def texts(self, body: Json, watch: Watch | None) -> tuple[list[Generated], Usage]:
        """Send a request, and read the texts of the answer and its cost."""

    async def generate_until(
        self, body: Json, request: GenRequest, stops: tuple[str, ...], why: str
    ) -> GenAnswer:
        """Answer `request` by `body`. The client watches for `stops`, for a reason to warn of."""
        watch = request.watch
        if stops:
            self.warn_once(why)
            watch = StopWatch(stops, watch) if request.sampling.n == 1 else None
        texts, usage = await self.texts(body, watch)
        return GenAnswer(tuple(cut_at_stop(text, stops) for text in texts), usage)

    async def choose(self, body: Json, choices: Sequence[str], how: str) -> ChoiceAnswer:
        """Choose without scores, by a `body` that is answered with a document of `choice_schema`.

        It is sent at temperature 0, or at the default temperature if the model does not accept
        one.
        """
        self.warn_once(
            f"select lets the model choose, by {how}: there are no scores, and the choice may "
            f"differ from that of a server with scores"
        )
        try:
            (answer, *_), usage = await self.texts({**body, "temperature": 0.0}, None)
        except BackendError as error:
            if error.status != 400 or "temperature" not in str(error):
                raise
            self.warn_once("select runs at the default temperature: the model accepts no other")
            (answer, *_), usage = await self.texts(body, None)
        with self.reading():
            document = json.loads(answer.text)
        choice = document.get("choice") if isinstance(document, dict) else None
        if choice not in choices:
            raise BackendError(
                f"{self.name} chose {choice!r}, which is none of the choices: it did not follow "
                f"the JSON schema in the request"
            )
        return ChoiceAnswer(choices.index(choice), usage)


class StopWatch:
    """Ends a streamed text at the first of `stops`, and passes what is before it to `watch`.

    A suffix that may be the beginning of a stop text is held back until more follows.
    """

    def __init__(self, stops: tuple[str, ...], watch: Watch | None) -> None:
        self._stops = stops
        self._watch = watch
        self._text = ""
        self._num_shown = 0

    def __call__(self, piece: str, num_tokens: int | None) -> bool:
        self._text += piece
        stop = first_stop(self._text, self._stops)
        end = stop[0] if stop else len(without_begun_stop(self._text, self._stops))
        shown = self._text[self._num_shown : end]
        self._num_shown = max(end, self._num_shown)
        enough = shown != "" and self._watch is not None and self._watch(shown, num_tokens)
        return enough or stop is not None


def cut_at_stop(generated: Generated, stops: tuple[str, ...]) -> Generated:
    """The text before the first of `stops`, or all of it."""
    stop = first_stop(generated.text, stops)
    return generated if stop is None else generated.cut(stop[0])


def choice_schema(choices: Sequence[str]) -> Json:
    """The JSON schema of a document that names one of `choices`."""
    one_of = {"type": "string", "enum": list(dict.fromkeys(choices))}
    return {
        "type": "object",
        "properties": {"choice": one_of},
        "required": ["choice"],
        "additionalProperties": False,
    }


# --- strict schemas ------------------------------------------------------------------------------

_STRICT_KEYWORDS = {
    *("$defs", "$ref", "additionalProperties", "anyOf", "const", "definitions", "description"),
    *("enum", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maximum", "minItems"),
    *("minimum", "multipleOf", "properties", "required", "title", "type"),
}


def strict_schema(schema: Json) -> Json | None:
    """`schema` in the form of strict mode, or None if strict mode cannot express it: every object
    is closed, and all its properties are required.

    Objects that do not say whether more properties are allowed are closed, so that every document
    of the result is valid for `schema`.
    """
    if schema.get("type") != "object":
        return None
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


class _NotStrictError(Exception):
    """Strict mode cannot express this."""


def _strict(schema: object) -> Json:
    if not isinstance(schema, dict) or not schema or schema.keys() - _STRICT_KEYWORDS:
        raise _NotStrictError
    if "$ref" in schema and len(schema) > 1:
        raise _NotStrictError
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if key in schema:
            result[key] = {name: _strict(inner) for name, inner in schema[key].items()}
    if "items" in schema:
        result["items"] = _strict(schema["items"])
    if "anyOf" in schema:
        result["anyOf"] = [_strict(inner) for inner in schema["anyOf"]]
    if "properties" in schema or schema.get("type") == "object":
        if set(schema.get("required", ())) != set(schema.get("properties", ())):
            raise _NotStrictError
        if schema.get("additionalProperties", False) is not False:
            raise _NotStrictError
        result["additionalProperties"] = False
    return result
