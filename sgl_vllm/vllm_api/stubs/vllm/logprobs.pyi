# [routes, engine_backend]
from collections.abc import Sequence

class Logprob:
    logprob: float

LogprobsOnePosition = dict[int, Logprob]
PromptLogprobs = Sequence[LogprobsOnePosition | None]
SampleLogprobs = Sequence[LogprobsOnePosition]
