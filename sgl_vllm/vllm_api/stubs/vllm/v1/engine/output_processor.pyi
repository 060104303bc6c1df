# [traces]
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import IterationStats

class RequestState: ...

class OutputProcessor:
    tracing_enabled: bool

    def do_tracing(
        self,
        engine_core_output: EngineCoreOutput,
        req_state: RequestState,
        iteration_stats: IterationStats | None,
    ) -> None: ...
