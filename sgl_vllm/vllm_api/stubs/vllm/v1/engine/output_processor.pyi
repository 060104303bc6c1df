# [routes]
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.metrics.stats import IterationStats

class RequestOutputCollector:  # [routes]
    def put(self, output: Exception) -> None: ...

class RequestState:  # [routes]
    queue: RequestOutputCollector | None  # [routes]

class OutputProcessor:
    request_states: dict[str, RequestState]  # [routes]

    @staticmethod
    def _trim_surplus_tokens(  # [jump_forward] since 0.32
        req_state: RequestState, output: EngineCoreOutput, num_prev_tokens: int
    ) -> None: ...
    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None: ...  # [routes]
    def propagate_error(self, e: Exception) -> None: ...  # [routes]
    def _update_stats_from_output(  # [routes]
        self,
        req_state: RequestState,
        engine_core_output: EngineCoreOutput,
        engine_core_timestamp: float | None,
        iteration_stats: IterationStats | None,
    ) -> None: ...
