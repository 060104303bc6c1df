from enum import Enum
from typing import Any

class SamplingParams:
    def __init__(  # [routes, self_check]
        self,
        *,
        n: int = ...,
        max_tokens: int | None = ...,
        min_tokens: int = ...,
        stop: str | list[str] | None = ...,
        stop_token_ids: list[int] | None = ...,
        temperature: float = ...,
        seed: int | None = ...,
        top_p: float = ...,
        top_k: int = ...,
        min_p: float = ...,
        frequency_penalty: float = ...,
        presence_penalty: float = ...,
        repetition_penalty: float = ...,
        ignore_eos: bool = ...,
        logprobs: int | None = ...,
        prompt_logprobs: int | None = ...,
        allowed_token_ids: list[int] | None = ...,
        structured_outputs: StructuredOutputsParams | None = ...,
        skip_reading_prefix_cache: bool | None = ...,
        extra_args: dict[str, Any] | None = ...,
        output_kind: RequestOutputKind = ...,
    ) -> None: ...

    extra_args: dict[str, Any] | None
    structured_outputs: StructuredOutputsParams | None  # [format_checks]
    output_kind: RequestOutputKind  # [jump_forward]
    max_tokens: int | None  # [rank_routing]
    prompt_logprobs: int | None  # [jump_forward, select]
    prompt_logprob_token_ids: object | None  # [jump_forward]
    # What a jump must leave as it is, or look at first.
    stop: str | list[str] | None  # [routes, jump_forward]
    stop_token_ids: list[int] | None  # [jump_forward]
    include_stop_str_in_output: bool  # [jump_forward]
    skip_special_tokens: bool  # [jump_forward]
    temperature: float  # [jump_forward]
    seed: int | None  # [jump_forward]
    logprobs: int | None  # [jump_forward]
    logprob_token_ids: list[int] | None  # [jump_forward]
    repetition_detection: object | None  # [jump_forward]
    bad_words: list[str] | None  # [routes, jump_forward]
    logit_bias: dict[int, float] | None  # [jump_forward]
    allowed_token_ids: list[int] | None  # [jump_forward]

    @property
    def all_stop_token_ids(self) -> set[int]: ...  # [jump_forward]
    def update_from_generation_config(  # [self_check]
        self, generation_config: dict[str, Any], eos_token_id: int | None = ...
    ) -> None: ...
    @property
    def bad_words_token_ids(self) -> list[list[int]] | None: ...  # [jump_forward]
    def _validate_structured_outputs(self, *args: Any) -> None: ...  # [format_checks]
    @property
    def num_logprobs(self) -> int | None: ...  # [jump_forward]
    @property
    def eos_token_id(self) -> int | None: ...  # [jump_forward]

class RequestOutputKind(Enum):  # [jump_forward]
    DELTA = ...
    FINAL_ONLY = ...

class StructuredOutputsParams:  # [format_checks, self_check]
    def __init__(
        self,
        *,
        json: str | dict[str, Any] | None = ...,
        regex: str | None = ...,
        grammar: str | None = ...,
        structural_tag: str | None = ...,
    ) -> None: ...

    json: str | dict[str, Any] | None
    json_object: bool | None  # [tools_and_format]
    regex: str | None
    grammar: str | None
    structural_tag: str | None
    choice: list[str] | None  # [format_checks]
    disable_any_whitespace: bool  # [routes, fsm]
    _backend: str | None  # [self_check]
