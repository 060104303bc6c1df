"""Rounds of the soak: one random program, a reference that is played once, and several engines in
random settings that must give its answers.

Owns the settings and what is counted. Does not own when it ends or the platform (`soak.py`).
"""

from __future__ import annotations

import faulthandler
import gc
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from tests.engine.engine import Engine
from tests.engine.models import Model
from tests.engine.play import (
    REFERENCE,
    Difference,
    Played,
    References,
    Setting,
    differences,
    play,
    references_on,
)
from tests.engine.programs import Program, random_program
from tests.engine.ties import JUDGE, gap

STOCK_EVERY = 4
"""In every so manieth round stock is played with its cache, too."""
BLOCKED_S = 600
"""So long may one engine take for a program before the soak prints where it is and ends."""

PLUGIN_OPTIONS: list[dict[str, Any]] = [
    *[{}] * 8,
    {"schedule_max_overtakes": 2},
    {"schedule_policy": "dfs-weight", "schedule_max_delay": 10.0},
    {"schedule_max_wait_s": 1.0},
    {"schedule_policy": "fcfs"},
    {"schedule_fair_quantum": 100, "schedule_max_overtakes": 0},
    {"schedule_fair_quantum": 1000},
    {"schedule_window": 3, "schedule_max_overtakes": 1},
    {"schedule": False},
    {"radix": False},
    {"jump_forward": False},
    {"jump_mode": "exact"},
]
ROWS = [
    *("requests compared", "differences", "near ties", "failed engines", "leaked blocks"),
    *("engines", "aborts", "preemptions", "partial hits", "jumps", "forced tokens", "stale tokens"),
    *("select scores", "overtakes", "forward passes"),
]


def random_setting(rng: random.Random, model: Model) -> Setting:
    """One of our engines; small caches are likelier than large ones."""
    block_size = rng.choice(model.block_sizes)
    more_blocks = int(rng.random() ** 2 * 40 * 32 / block_size)
    chunked = model.is_always_chunked or rng.random() < 0.8
    return Setting(
        plugin=rng.choice(PLUGIN_OPTIONS),
        block_size=block_size,
        num_blocks=model.num_fewest_blocks(block_size) + more_blocks,
        max_num_batched_tokens=rng.choice(model.chunk_sizes) if chunked else 1024,
        chunked=chunked,
        max_num_seqs=rng.choice([4, 8, 16, 16, 32]),
        policy=rng.choice(["fcfs", "fcfs", "fcfs", "fcfs", "priority"]),
        grammars_in_background=rng.random() < 0.2,
    )


class Soak:
    """Counts, and what went wrong, over all rounds so far."""

    def __init__(
        self,
        platform: str,
        model_name: str,
        model: Model,
        engine_args: dict[str, Any],
        calls_per_program: int,
        settings_per_round: int,
    ) -> None:
        self._platform = platform
        self._model_name = model_name
        self._model = model
        self._engine_args = engine_args
        self._calls_per_program = calls_per_program
        self._settings_per_round = settings_per_round
        self.counts: Counter[str] = Counter(dict.fromkeys(ROWS, 0))
        self.problems: list[str] = []

    def round(self, seed: int, progress: tqdm) -> None:
        """One program on several engines."""
        rng = random.Random(seed)
        program = random_program(seed, self._calls_per_program)
        settings = [random_setting(rng, self._model) for _ in range(self._settings_per_round)]
        with_stock = rng.random() < 1 / STOCK_EVERY
        reference = replace(REFERENCE, block_size=self._model.block_sizes[0])
        with self._started(reference) as engine:
            references = references_on(engine, program)
        self._compare(seed, program, references, reference, references.stock, progress)
        if with_stock:
            settings.append(self._stock_setting(rng))
        for setting in settings:
            with self._started(setting) as engine:
                try:
                    played = play(engine, program, references.narrowed.prompts)
                except Exception:
                    self.counts["failed engines"] += 1
                    self.counts["leaked blocks"] += _leaked_blocks(engine)
                    self._report(seed, setting, traceback.format_exc())
                    continue
            self._compare(seed, program, references, setting, played, progress)

    def _compare(
        self,
        seed: int,
        program: Program,
        references: References,
        setting: Setting,
        played: Played,
        progress: tqdm,
    ) -> None:
        self.counts += played.counts
        self.counts["engines"] += 1
        self.counts["requests compared"] += len(played.answers)
        progress.update(len(played.answers))
        expected = references.expected_by(setting, program)
        found = list(differences(program, expected, played, self._model.tolerance))
        for difference, distance in self._with_gaps(found):
            if distance <= self._model.near_tie:
                self.counts["near ties"] += 1
                progress.write(f"seed {seed}: near tie, logits {distance:.1e} apart: {setting}")
            else:
                self.counts["differences"] += 1
                self._report(seed, setting, f"logits {distance:.1e} apart\n{difference}")

    def _report(self, seed: int, setting: Setting, what: str) -> None:
        problem = f"{what}\n  in {setting}\n  again: {self._command_for(seed)}"
        self.problems.append(problem)
        tqdm.write(problem + "\n")

    def _command_for(self, seed: int) -> str:
        return (
            f"python -m tests.engine.soak --vllm-platform {self._platform} "
            f"--model {self._model_name} --seed {seed} --calls {self._calls_per_program} "
            f"--engines {self._settings_per_round} --requests 1"
        )

    def _stock_setting(self, rng: random.Random) -> Setting:
        block_size = self._model.block_sizes[0]
        fewest = self._model.num_fewest_blocks(block_size)
        return Setting(
            None,
            block_size=block_size,
            num_blocks=fewest + rng.randint(0, 35),
            max_num_batched_tokens=self._model.chunk_sizes[-1],  # `fewest` is for these at most
        )

    @contextmanager
    def _started(self, setting: Setting) -> Iterator[Engine]:
        faulthandler.dump_traceback_later(BLOCKED_S, exit=True)
        engine = Engine(setting.plugin, **{**self._engine_args, **setting.engine_args})
        try:
            setting.prepare(engine)
            yield engine
        finally:
            engine.stop()
            del engine
            gc.collect()
            faulthandler.cancel_dump_traceback_later()

    def _with_gaps(self, found: list[Difference]) -> list[tuple[Difference, float]]:
        if not found:
            return []
        engine = Engine(None, **{**self._engine_args, **JUDGE})
        try:
            return [(difference, gap(engine, difference)) for difference in found]
        finally:
            engine.stop()


def _leaked_blocks(engine: Engine) -> int:
    """Blocks that an engine without requests still holds."""
    if engine.scheduler.requests:
        return 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
