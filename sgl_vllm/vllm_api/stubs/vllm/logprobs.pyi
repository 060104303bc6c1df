# [routes, engine_backend]
from collections.abc import Sequence

class Logprob:
    logprob: float
    decoded_token: str | None  # [engine_backend]

LogprobsOnePosition = dict[int, Logprob]
PromptLogprobs = Sequence[LogprobsOnePosition | None]
SampleLogprobs = Sequence[LogprobsOnePosition]
