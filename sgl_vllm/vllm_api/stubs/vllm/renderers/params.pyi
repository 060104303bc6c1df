# [routes]
class TokenizeParams:
    def __init__(
        self,
        *,
        max_total_tokens: int | None,
        max_output_tokens: int = ...,
        add_special_tokens: bool = ...,
        needs_detokenization: bool = ...,
    ) -> None: ...
