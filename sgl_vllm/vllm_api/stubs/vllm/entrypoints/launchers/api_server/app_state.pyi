# [engine_backend]
from argparse import Namespace

from starlette.datastructures import State
from vllm.v1.engine.async_llm import AsyncLLM

async def init_app_state(
    engine_client: AsyncLLM,
    state: State,
    args: Namespace,
    supported_tasks: tuple[str, ...] | None = ...,
) -> None: ...
