"""A whole self-check: marker, stages, what is switched off, and the engine as it was before.

Owns the order, and that the engine serves afterwards: an error here never ends it. The one
exception is a device that cannot run a plain request any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.self_check import canaries, engine_state
from sgl_vllm.self_check.canaries import FORMATS, Canary, Shape, repeated
from sgl_vllm.self_check.driver import Driver, RunFailed, StepLimits, Text
from sgl_vllm.self_check.language import TokenTable
from sgl_vllm.self_check.marker import DeviceLost
from sgl_vllm.self_check.plan import CHECKED, NEED_CHECK, facts_of, marker_for
from sgl_vllm.self_check.report import AGREES, DISAGREES, CheckReport, PartReport
from sgl_vllm.self_check.stages import StageResult, Stages
from sgl_vllm.self_check.unseen import canaries_unseen

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from sgl_vllm.scheduler.assembly import Parts

logger = init_logger("vllm.sgl_vllm.self_check")

NEEDS_TEXT = ("fsm", "jump_forward")


class NoRoom(Exception):
    """The engine is too small for the canaries. The message says why."""


def check_engine(
    engine: EngineCore,
    parts: Parts,
    *,
    rounds: int = 1,
    names: Collection[str] = CHECKED,
    limits: StepLimits | None = None,
) -> CheckReport:
    """Check the parts of an engine that does not serve yet; those that disagree are switched off.

    Args:
        rounds: how often each comparison runs. A server runs one.
        names: the parts to check.
        limits: when a run counts as hanging.

    Raises:
        DeviceLost: afterwards the engine cannot run a request.
    """
    options = Options.from_mapping((engine.vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
    facts = parts.engine.scheduler
    report = CheckReport(facts=facts_of(facts, options))
    started = time.perf_counter()
    with (
        marker_for(facts, options).held(),
        engine_state.random_generators_kept(),
        engine_state.backend_kept(engine),
        canaries_unseen(parts.scheduler),
    ):
        check = _Check(engine, parts, report, rounds, names, Driver(engine, None, limits))
        try:
            check.run()
        except Exception as error:
            check.has_failed(error)
        check.leave_no_trace()
    report.seconds = time.perf_counter() - started
    report.states = parts.states()
    _log(report)
    return report


class _Check:
    """One check, and what it has switched off so far."""

    def __init__(
        self,
        engine: EngineCore,
        parts: Parts,
        report: CheckReport,
        rounds: int,
        names: Collection[str],
        driver: Driver,
    ) -> None:
        self._engine = engine
        self._parts = parts
        self._report = report
        self._rounds = rounds
        self._names = [name for name in CHECKED if name in names and name not in parts.off]
        self._driver = driver
        self._plain = Canary((), 0)

    # -- stages -----------------------------------------------------------------------------------

    def run(self) -> None:
        model = self._engine.vllm_config.model_config
        driver = self._driver
        driver.text = self._text()
        shape = self._shape()
        self._plain = Canary(repeated(shape, 0, 10), 2, reads_cache=False)
        if reason := shape.why_not():
            raise NoRoom(reason)
        stages = Stages(
            driver,
            shape,
            self,
            dtype=str(model.dtype).removeprefix("torch."),
            has_logprobs=model.logprobs_mode in ("raw_logprobs", "processed_logprobs"),
            rounds=self._rounds,
        )
        with self._recording_jumps():
            stages.measure_noise()
            self._report.noise, self._report.tolerance = stages.noise, stages.tolerance
            for part in self._names:
                if part not in self._parts.off and (part not in NEEDS_TEXT or driver.text):
                    self._stage(stages, part)
        self._report.forward_passes = driver.num_steps

    def _stage(self, stages: Stages, part: str) -> None:
        result = StageResult(part)
        try:
            stages.run(part, result)
        except RunFailed as error:
            result.problems.append(str(error))
        except Exception as error:
            logger.exception("sgl-vllm: the self-check of %s failed. Please report this", part)
            result.problems.append(f"the check itself failed: {type(error).__name__}: {error}")
        errors = self._parts.num_errors(part)
        if errors:
            result.problems.append(f"{errors} unexpected errors, which are in the log")
        if problem := engine_state.idle_problem(self._engine.scheduler, self._parts):
            result.problems.append(problem)
        self._report.parts.append(_report_of(result))
        if result.problems:
            self._parts.switch_off(part, f"the self-check found: {result.problems[0]}")
            self._make_idle()
            self._require_device()

    def _make_idle(self) -> None:
        """
        Raises:
            DeviceLost: it cannot be made idle, so it must not serve.
        """
        try:
            engine_state.make_idle(self._engine.scheduler)
            problem = engine_state.idle_problem(self._engine.scheduler, self._parts)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise DeviceLost(
                f"the engine cannot be cleaned up after a fault in its self-check ({problem}). At "
                "the next start, the parts of sgl-vllm will be off"
            )

    def _require_device(self) -> None:
        """
        Raises:
            DeviceLost: vLLM's own paths do not work either.
        """
        with self.without("jump_forward", "select"):
            try:
                self._driver.run([self._plain], rows=False)
            except RunFailed as error:
                raise DeviceLost(
                    "after a fault in its self-check, the engine cannot run a plain request "
                    f"({error}). At the next start, the parts of sgl-vllm will be off"
                ) from error

    # -- switches ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def without(self, *parts: str) -> Iterator[None]:
        """While inside, these parts do nothing. Only at idle."""
        jump, select = self._parts.jump, self._parts.select
        if "jump_forward" in parts:
            self._parts.jump = None
        if "select" in parts:
            self._parts.select = None
        try:
            yield
        finally:
            self._parts.jump, self._parts.select = jump, select

    @contextlib.contextmanager
    def _recording_jumps(self) -> Iterator[None]:
        jump = self._parts.jump
        if jump is None:
            yield
            return
        recorder = self._driver.recorder
        jump.listeners.append(recorder)
        jump.short_runs.listeners.append(recorder.jumped)
        try:
            yield
        finally:
            jump.listeners.remove(recorder)
            jump.short_runs.listeners.remove(recorder.jumped)

    # -- the end ----------------------------------------------------------------------------------

    def has_failed(self, error: Exception) -> None:
        """No further part can be checked. After a run that has failed, every part that has not
        agreed is switched off; otherwise those that need a check."""
        if isinstance(error, DeviceLost):
            raise error
        is_expected = isinstance(error, RunFailed | NoRoom)
        if not is_expected:
            logger.exception("sgl-vllm: the self-check failed. Please report this")
        self._report.error = str(error) if is_expected else f"{type(error).__name__}: {error}"
        agreed = {part.name for part in self._report.parts if part.outcome == AGREES}
        for part in self._names if isinstance(error, RunFailed) else NEED_CHECK:
            if part not in self._parts.off and part not in agreed:
                self._parts.switch_off(part, f"the self-check failed: {self._report.error}")
        if not isinstance(error, NoRoom):
            self._make_idle()
            self._require_device()

    def leave_no_trace(self) -> None:
        try:
            engine_state.forget_canaries(self._engine, self._parts)
        except Exception:
            logger.exception("sgl-vllm: traces of the self-check are left. Please report this")

    # -- what canaries are made of ----------------------------------------------------------------

    def _text(self) -> Text | None:
        """None if the engine has no tokenizer."""
        if self._engine.vllm_config.model_config.skip_tokenizer_init:
            return None
        token_bytes, end_token = self._parts.token_bytes()
        own_end = getattr(self._engine.structured_output_manager.tokenizer, "eos_token_id", None)
        return Text(TokenTable(token_bytes, FORMATS), end_token if own_end is None else own_end)

    def _shape(self) -> Shape:
        scheduler = self._engine.scheduler
        has_one_kind = len(self._parts.engine.kv_cache_config.kv_cache_groups) == 1
        # Blocks of recurrent models hold up to some thousand tokens.
        block_size = scheduler.block_size if has_one_kind else min(32, scheduler.block_size)
        return Shape(
            block_size,
            scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            self._engine.vllm_config.model_config.max_model_len,
            self._vocabulary(self._driver.text),
            can_be_tight=has_one_kind,
        )

    def _vocabulary(self, text: Text | None) -> list[int]:
        """Tokens for prompts: ordinary text where the tokenizer is known."""
        num_tokens = self._engine.vllm_config.model_config.get_vocab_size()
        if text is None:
            return list(range(10, max(11, num_tokens // 2)))
        ordinary = [token for token in range(num_tokens) if text.table.bytes_of((token,))]
        return ordinary[:: max(1, len(ordinary) // canaries.MAX_VOCABULARY)]


def _report_of(result: StageResult) -> PartReport:
    agreement = result.agreement
    return PartReport(
        result.part,
        DISAGREES if result.problems else AGREES,
        list(result.problems),
        agreement.num_compared,
        agreement.num_ties,
        agreement.largest,
        result.with_s,
        result.without_s,
        result.is_slower,
        dict(result.notes),
    )


def _log(report: CheckReport) -> None:
    """One line for what agrees, and one for each part that does not or that is slower."""
    for part in report.parts:
        if part.outcome != AGREES:
            logger.warning(
                "sgl-vllm: %s disagrees with vLLM on this device and is switched off: %s. "
                "Please report this with the output of `sgl-vllm verify`",
                part.name,
                part.problems[0],
            )
        elif part.is_slower:
            logger.warning(
                "sgl-vllm: %s took %.3f s for the self-check's few short requests, and vLLM "
                "without it %.3f s. It stays on. Measure it with your own requests "
                "(`sgl-vllm bench ab --help`); %s=false switches it off",
                part.name,
                part.with_s,
                part.without_s,
                part.name,
            )
    logger.info(
        "sgl-vllm: the self-check took %.1f s: %s",
        report.seconds,
        report.error or "; ".join(f"{part.name} {part.outcome}" for part in report.parts),
    )
