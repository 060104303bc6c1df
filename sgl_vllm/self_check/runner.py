"""A whole self-check: marker, stages, what is switched off, and the engine as it was before.

Owns the order, and that the engine serves afterwards: an error here never ends it. The one
exception is a device that cannot run a plain request any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.self_check import engine_state
from sgl_vllm.self_check.canaries import FORMATS, MAX_VOCABULARY, Canary, Shape
from sgl_vllm.self_check.driver import Driver, RunFailed, StepLimits
from sgl_vllm.self_check.language import TokenTable
from sgl_vllm.self_check.marker import DeviceLost
from sgl_vllm.self_check.plan import CHECKED, NEED_CHECK, facts_of, marker_for
from sgl_vllm.self_check.report import CheckReport, PartReport
from sgl_vllm.self_check.stages import Stages, without

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from sgl_vllm.scheduler.assembly import Parts

logger = init_logger("vllm.sgl_vllm.self_check")

NEEDS_TEXT = ("fsm", "jump_forward")
LOST = "At the next start, the parts of sgl-vllm will be off"


def check_engine(
    engine: EngineCore, parts: Parts, *, rounds: int = 1, limits: StepLimits | None = None
) -> CheckReport:
    """Check the parts of an engine that does not serve yet; those that disagree are switched off.

    Args:
        rounds: how often each comparison runs. A server runs one.
        limits: when a run counts as hanging.

    Raises:
        DeviceLost: afterwards the engine cannot run a request.
    """
    options = Options.from_mapping((engine.vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
    facts = parts.engine.scheduler
    report = CheckReport(facts=facts_of(facts, options))
    started = time.perf_counter()
    with marker_for(facts, options).held(), engine_state.undisturbed(engine, parts.scheduler):
        check = _Check(engine, parts, report, Driver(engine, limits))
        try:
            check.run(rounds)
        except DeviceLost:
            raise
        except RunFailed as error:
            check.give_up(str(error), CHECKED)
            check.require_device()
        except Exception as error:
            logger.exception("sgl-vllm: the self-check failed. Please report this")
            check.give_up(f"{type(error).__name__}: {error}", NEED_CHECK)
            check.require_device()
        try:
            engine_state.forget_canaries(engine, parts)
        except Exception:
            logger.exception("sgl-vllm: traces of the self-check are left. Please report this")
    report.seconds = time.perf_counter() - started
    report.states = parts.states()
    _log(report)
    return report


class _Check:
    """One check, and what it has switched off so far."""

    def __init__(
        self, engine: EngineCore, parts: Parts, report: CheckReport, driver: Driver
    ) -> None:
        self._engine = engine
        self._parts = parts
        self._report = report
        self._driver = driver

    def run(self, rounds: int) -> None:
        """
        Raises:
            RunFailed, Exception: no part can be checked, or no further one.
            DeviceLost: as `check_engine` does.
        """
        driver, report = self._driver, self._report
        driver.table = self._table()
        shape = self._shape()
        if reason := shape.why_not():
            self.give_up(reason, NEED_CHECK)
            return
        stages = Stages(driver, shape, self._parts, self._engine.vllm_config)
        with self._recording_jumps():
            stages.measure_noise()
            report.noise, report.tolerance = stages.noise, stages.tolerance
            for part in CHECKED:
                if part not in self._parts.off and (part not in NEEDS_TEXT or driver.table):
                    self._stage(stages, part, rounds)
        report.forward_passes = driver.num_passes

    def _stage(self, stages: Stages, part: str, rounds: int) -> None:
        found = PartReport(part)
        try:
            for _ in range(rounds):
                if found.agrees:
                    stages.run(found)
        except RunFailed as error:
            found.problems.append(str(error))
        except Exception as error:
            logger.exception("sgl-vllm: the self-check of %s failed. Please report this", part)
            found.problems.append(f"the check itself failed: {type(error).__name__}: {error}")
        if errors := self._parts.num_errors(part):
            found.problems.append(f"{errors} unexpected errors, which are in the log")
        if found.agrees and (problem := engine_state.idle_problem(self._engine, self._parts)):
            found.problems.append(problem)
        self._report.parts.append(found)
        if not found.agrees:
            self._switch_off([part], f"the self-check found: {found.problems[0]}")
            self.require_device()

    def give_up(self, error: str, unchecked: Collection[str]) -> None:
        """No further part can be checked: switch off those of `unchecked` that have not agreed."""
        self._report.error = error
        done = {*self._parts.off, *(part.name for part in self._report.parts)}
        names = [name for name in unchecked if name not in done]
        self._switch_off(names, f"the self-check failed: {error}")

    def _switch_off(self, names: Iterable[str], reason: str) -> None:
        """Switch parts off, and make the engine idle.

        Raises:
            DeviceLost: it cannot be made idle, so it must not serve.
        """
        try:
            engine_state.take_out_requests(self._engine, self._driver.limits.stalled_s)
            for name in names:
                self._parts.switch_off(name, reason)
            engine_state.free_blocks(self._engine.scheduler)
            problem = engine_state.idle_problem(self._engine, self._parts)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise DeviceLost(
                f"the engine cannot be cleaned up after a fault in its self-check ({problem}). "
                + LOST
            )

    def require_device(self) -> None:
        """
        Raises:
            DeviceLost: vLLM's own paths do not work either.
        """
        plain = Canary((*range(10, 20),), 2, reads_cache=False)
        try:
            with without(self._parts, "jump_forward", "select"):
                self._driver.run([plain], rows=False)
        except RunFailed as error:
            raise DeviceLost(
                "after a fault in its self-check, the engine cannot run a plain request "
                f"({error}). {LOST}"
            ) from error

    @contextlib.contextmanager
    def _recording_jumps(self) -> Iterator[None]:
        if (jump := self._parts.jump) is None:
            yield
            return
        jump.listeners.append(self._driver)
        jump.short_runs.listeners.append(self._driver.jumped)
        try:
            yield
        finally:
            jump.listeners.remove(self._driver)
            jump.short_runs.listeners.remove(self._driver.jumped)

    # -- what canaries are made of ----------------------------------------------------------------

    def _table(self) -> TokenTable | None:
        """None if the engine has no tokenizer."""
        if self._engine.vllm_config.model_config.skip_tokenizer_init:
            return None
        token_bytes, end_token = self._parts.token_bytes()
        own_end = getattr(self._engine.structured_output_manager.tokenizer, "eos_token_id", None)
        return TokenTable(token_bytes, end_token if own_end is None else own_end, FORMATS)

    def _shape(self) -> Shape:
        scheduler, model = self._engine.scheduler, self._engine.vllm_config.model_config
        has_one_kind = len(self._parts.engine.kv_cache_config.kv_cache_groups) == 1
        vocabulary = [*range(10, max(11, model.get_vocab_size() // 2))]
        if (table := self._driver.table) is not None:  # ordinary text
            vocabulary = [one for one in range(model.get_vocab_size()) if table.bytes_of((one,))]
            vocabulary = vocabulary[:: max(1, len(vocabulary) // MAX_VOCABULARY)]
        return Shape(
            # Blocks of recurrent models hold up to some thousand tokens.
            scheduler.block_size if has_one_kind else min(32, scheduler.block_size),
            scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            model.max_model_len,
            vocabulary,
            can_be_tight=has_one_kind,
        )


def _log(report: CheckReport) -> None:
    """One line for what agrees, and one for each part that does not."""
    for part in report.parts:
        if not part.agrees:
            logger.warning(
                "sgl-vllm: %s disagrees with vLLM on this device and is switched off: %s. "
                "Please report this with the output of `sgl-vllm verify`",
                part.name,
                part.problems[0],
            )
    logger.info(
        "sgl-vllm: the self-check took %.1f s: %s",
        report.seconds,
        report.error or "; ".join(f"{part.name} {part.outcome}" for part in report.parts),
    )
