# [routes, engine_backend]
from typing import Any, Self

class ChatParams:  # [engine_backend]
    def __init__(
        self,
        *,
        chat_template_kwargs: dict[str, Any] = ...,
        media_io_kwargs: dict[str, dict[str, Any]] | None = ...,
    ) -> None: ...
    def with_defaults(
        self, *, default_media_io_kwargs: dict[str, dict[str, Any]] | None = ...
    ) -> Self: ...

class TokenizeParams:
    def __init__(
        self,
        *,
        max_total_tokens: int | None,
        max_output_tokens: int = ...,
        add_special_tokens: bool = ...,
        needs_detokenization: bool = ...,
    ) -> None: ...
