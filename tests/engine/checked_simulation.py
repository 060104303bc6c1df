"""A simulation in which every slot of the cache knows what it was computed for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from benchmarks.engine_settings import EngineSettings
from benchmarks.simulator import Simulation, Step
from benchmarks.traces import Trace
from tests.engine.kv_memory import KvMemory, Reader


class CheckedSimulation(Simulation):
    """Each pass is checked with a `KvMemory`. In a share of the passes, one of the requests is
    aborted while the pass runs."""

    def __init__(
        self,
        trace: Trace,
        arm: str,
        settings: EngineSettings,
        *args: Any,
        abort_share: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(trace, arm, settings, *args, **options)
        self.memory = KvMemory(settings.num_blocks + 1, settings.block_size)
        self._abort_share = abort_share
        self._rng = random.Random(0)

    def schedule(self) -> Step:
        step = super().schedule()
        self.check_kv(step.scheduled)
        if self._rng.random() < self._abort_share:
            alive = [i for i in self.served if i in self.scheduler.requests]
            if alive:
                request_id = self._rng.choice(alive)
                self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
                self.after_call(request_id)
        return step

    def check_kv(self, scheduled: SchedulerOutput) -> None:
        readers = []
        for request_id, num_new in scheduled.num_scheduled_tokens.items():
            call = self.served[request_id].call
            end = self.scheduler.requests[request_id].num_computed_tokens
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            contents = self.memory.contents(np.concatenate([call.prompt, call.reply])[:end])
            readers.append(Reader(request_id, block_ids, contents, end - num_new))
        self.memory.run(scheduled.kv_cache_block_copies or (), readers)
