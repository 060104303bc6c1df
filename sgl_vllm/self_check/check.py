"""A whole self-check: what is compared of each part, and what is switched off.

Each stage adds one part, so a fault belongs to the last one added.

    stage          parts on                     compared with
    noise          radix, fsm, without hits     the same requests in another order
    radix          radix                        the same prompts, computed from the first token on
    fsm            radix, fsm                   the same formats, by listing their texts
    jump_forward   radix, fsm, jump_forward     the same tokens decoded one by one, jumps off
    select         all                          the same scores, by vLLM

A part that has failed its stage is off in those that follow. Each stage begins with an empty cache:
what a request computes is cached, even if the request does not read the cache.

The engine serves afterwards: an error here never ends it. The one exception is a device that cannot
run a plain request any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sgl_vllm.self_check import canaries as make
from sgl_vllm.self_check.canaries import Canary, Shape
from sgl_vllm.self_check.driver import Driver, RunFailed
from sgl_vllm.self_check.language import TokenTable
from sgl_vllm.self_check.marker import DeviceLost
from sgl_vllm.self_check.plan import CHECKED, NEED_CHECK, facts_of, marker_for
from sgl_vllm.self_check.report import Answer, CheckReport, PartReport, tolerance_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from sgl_vllm.scheduler.assembly import Parts

logger = init_logger("vllm.sgl_vllm.self_check")

NEEDS_TEXT = ("fsm", "jump_forward")
LOST = "At the next start, the parts of sgl-vllm will be off"


def check_engine(engine: EngineCore, parts: Parts) -> CheckReport:
    """Check the parts of an engine that does not serve yet; those that disagree are switched off.

    Raises:
        DeviceLost: afterwards the engine cannot run a request.
    """
    facts, options = parts.engine.scheduler, parts.engine.options
    report = CheckReport(facts=facts_of(facts, options))
    started = time.perf_counter()
    driver = Driver(engine, parts)
    with marker_for(facts, options).held(), driver.undisturbed():
        check = _Check(engine, parts, report, driver)
        try:
            check.run()
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
            driver.forget_canaries()
        except Exception:
            logger.exception("sgl-vllm: traces of the self-check are left. Please report this")
    report.seconds = time.perf_counter() - started
    report.states = parts.states()
    for part in report.parts:
        if not part.agrees:
            logger.warning(
                "sgl-vllm: %s disagrees with vLLM on this device and is switched off: %s. "
                "Please report this with the output of `sgl-vllm verify`",
                part.name,
                part.problems[0],
            )
    found = (f"{one.name} {'agrees' if one.agrees else 'disagrees'}" for one in report.parts)
    logger.info(
        "sgl-vllm: the self-check took %.1f s: %s",
        report.seconds,
        report.error or "; ".join(found),
    )
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
        self._shape: Shape
        self._cold: list[Answer] = []
        """Of the hits, computed from the first token on."""

    def run(self) -> None:
        """
        Raises:
            RunFailed, Exception: no part can be checked, or no further one.
            DeviceLost: as `check_engine` does.
        """
        driver = self._driver
        driver.table = self._table()
        self._shape = self._shape_of_engine()
        if reason := self._shape.why_not():
            self.give_up(reason, NEED_CHECK)
            return
        with driver.recording_jumps():
            self._measure_noise()
            for part in CHECKED:
                if part not in self._parts.off and (part not in NEEDS_TEXT or driver.table):
                    self._stage(part)
        self._report.forward_passes = driver.num_passes

    def _stage(self, part: str) -> None:
        found = PartReport(part)
        try:
            self._driver.empty_cache()
            getattr(self, f"_{part}")(found)
        except RunFailed as error:
            found.problems.append(str(error))
        except Exception as error:
            logger.exception("sgl-vllm: the self-check of %s failed. Please report this", part)
            found.problems.append(f"the check itself failed: {type(error).__name__}: {error}")
        if errors := self._parts.num_errors(part):
            found.problems.append(f"{errors} unexpected errors, which are in the log")
        if found.agrees and (problem := self._driver.idle_problem()):
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
            self._driver.take_out_requests()
            for name in names:
                self._parts.switch_off(name, reason)
            self._driver.free_blocks()
            problem = self._driver.idle_problem()
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
            with self._without("jump_forward", "select"):
                self._driver.run([plain], rows=False)
        except RunFailed as error:
            raise DeviceLost(
                "after a fault in its self-check, the engine cannot run a plain request "
                f"({error}). {LOST}"
            ) from error

    # -- what canaries are made of ----------------------------------------------------------------

    def _table(self) -> TokenTable | None:
        """None if the engine has no tokenizer."""
        if self._engine.vllm_config.model_config.skip_tokenizer_init:
            return None
        token_bytes, end_token = self._parts.token_bytes()
        own_end = getattr(self._engine.structured_output_manager.tokenizer, "eos_token_id", None)
        return TokenTable(token_bytes, end_token if own_end is None else own_end, make.FORMATS)

    def _shape_of_engine(self) -> Shape:
        scheduler, model = self._engine.scheduler, self._engine.vllm_config.model_config
        has_one_kind = len(self._parts.engine.kv_cache_config.kv_cache_groups) == 1
        vocabulary = [*range(10, max(11, model.get_vocab_size() // 2))]
        if (table := self._driver.table) is not None:  # ordinary text
            vocabulary = [one for one in range(model.get_vocab_size()) if table.bytes_of((one,))]
            vocabulary = vocabulary[:: max(1, len(vocabulary) // make.MAX_VOCABULARY)]
        return Shape(
            # Blocks of recurrent models hold up to some thousand tokens.
            scheduler.block_size if has_one_kind else min(32, scheduler.block_size),
            scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            model.max_model_len,
            vocabulary,
            can_be_tight=has_one_kind,
        )

    # -- the stages -------------------------------------------------------------------------------

    def _measure_noise(self) -> None:
        """How much the answers of two batches without cache hits differ.

        Raises:
            RunFailed: their answers cannot be compared, so no part can be checked.
        """
        plain = make.cold(make.hits(self._shape))
        with self._without("jump_forward", "select"):
            self._cold = self._driver.run(plain)
            again = self._driver.run(plain[::-1])
        found = PartReport("noise")
        found.compare(again[::-1], self._cold, float("inf"))
        if found.problems:
            raise RunFailed(f"two runs of the same requests differ: {found.problems[0]}")
        dtype = str(self._engine.vllm_config.model_config.dtype).removeprefix("torch.")
        self._report.noise = found.largest_difference
        self._report.tolerance = tolerance_of(dtype, found.largest_difference)

    def _radix(self, found: PartReport) -> None:
        """Hits inside a block, several in a step; and preempted requests that are resumed."""
        hits = make.hits(self._shape)
        with self._without("jump_forward", "select"):
            self._driver.run(make.prefixes(self._shape))
            got = self._driver.run(hits)
            self._compare(got, self._cold, found)
            tight = self._with_little_room(hits, 2 * make.NUM_PREFIXES + len(hits) + 1)
            self._compare(tight or got, self._cold, found)
        self._note_hits(got, found)
        found.notes["preemptions"] = _num_preemptions(tight)

    def _fsm(self, found: PartReport) -> None:
        """Masks of several formats in one batch. Jumps are off."""
        asked = make.structured(self._shape)
        with self._without("jump_forward", "select"):
            got = self._driver.run(asked)
            found.problems.extend(self._wrong_texts(asked, got))
            if found.agrees:
                self._compare(got, self._driver.run(asked, reference=True), found)

    def _jump_forward(self, found: PartReport) -> None:
        """Jumps beside requests that decode, with room and without."""
        asked = make.structured(self._shape)
        num_prompt_blocks = sum(-(-len(one.prompt) // self._shape.block_size) for one in asked)
        mode = self._engine.vllm_config.model_config.logprobs_mode
        rows = mode in ("raw_logprobs", "processed_logprobs")
        with self._without("select"):
            got = self._driver.run(asked, rows=rows)
            tight = self._with_little_room(asked, num_prompt_blocks + 1, rows=rows)
            found_answers = [answers for answers in (got, tight) if answers]
            for answers in found_answers:
                found.problems.extend(self._wrong_texts(asked, answers))
            if found.problems:
                return
            with self._without("jump_forward"):
                want: list[Answer] = []
                for answers in found_answers:
                    if [one.tokens for one in want] != [one.tokens for one in answers]:
                        want = self._one_by_one(asked, answers)
                    self._compare(answers, want, found)
        found.notes["forced_tokens"] = sum(len(answer.forced) for answer in got)
        found.notes["preemptions"] = _num_preemptions(tight)

    def _one_by_one(self, asked: Sequence[Canary], got: Sequence[Answer]) -> list[Answer]:
        """The same forced tokens, each decoded in its own pass, after prompts that are computed
        again."""
        self._driver.empty_cache()
        forced = [{place: answer.tokens[place] for place in answer.forced} for answer in got]
        return self._driver.run(make.cold(asked), reference=True, forced=forced)

    def _wrong_texts(self, asked: Sequence[Canary], got: Sequence[Answer]) -> Iterator[str]:
        """Answers that do not fit their format, or have forced tokens that it does not force."""
        table = self._driver.table
        assert table is not None
        for number, (canary, answer) in enumerate(zip(asked, got, strict=True)):
            if (language := canary.language) is None:
                continue
            why = table.why_not_forced(language, answer.tokens, answer.forced)
            if answer.finish_reason == "stop":
                why = table.why_not_in(language, answer.tokens) or why
            elif answer.finish_reason != "length":
                why = f"it ended by {answer.finish_reason or 'nothing'}"
            if why:
                yield f"request {number}: {why}"

    def _select(self, found: PartReport) -> None:
        """Log-probabilities of whole prompts, and scores of choices: with nothing cached, with the
        prefix cached, and in chunks."""
        by_select = make.scored(self._shape, by_select=True)
        whole = make.scored(self._shape, by_select=False)
        with self._without("jump_forward"):
            with self._without("select"):
                want = self._driver.run(whole)
            for _ in range(2):  # from the cache the second time
                self._compare(self._driver.run(whole), want, found)
            self._driver.empty_cache()
            self._compare(self._driver.run(by_select), want, found)
            cached = self._driver.run(by_select)
            self._compare(cached, want, found)
            if self._engine.vllm_config.scheduler_config.enable_chunked_prefill:
                self._driver.empty_cache()
                with self._driver.small_steps(self._shape.block_size + 5):
                    self._compare(self._driver.run(by_select), want, found)
        self._note_hits(cached, found)

    # -- all --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _without(self, *names: str) -> Iterator[None]:
        """While inside, `jump_forward` or `select` do nothing. Only at idle."""
        parts = self._parts
        jump, select = parts.jump, parts.select
        if "jump_forward" in names:
            parts.jump = None
        if "select" in names:
            parts.select = None
        parts.have_changed()
        try:
            yield
        finally:
            parts.jump, parts.select = jump, select
            parts.have_changed()

    def _with_little_room(
        self, asked: Sequence[Canary], num_blocks: int, *, rows: bool = True
    ) -> list[Answer]:
        """The answers where requests preempt each other; none where it is not known with how many
        blocks they do."""
        if not self._shape.can_be_tight:
            return []
        with self._driver.little_room(num_blocks):
            return self._driver.run(make.at_once(asked), rows=rows)

    def _compare(self, got: Sequence[Answer], want: Sequence[Answer], found: PartReport) -> None:
        found.compare(got, want, self._report.tolerance)

    def _note_hits(self, got: Sequence[Answer], found: PartReport) -> None:
        num_tokens = found.notes["hit_tokens"] = sum(answer.num_cached_tokens for answer in got)
        if not num_tokens and found.agrees:
            found.problems.append("no request found the prefix that another has left")


def _num_preemptions(answers: Sequence[Answer]) -> int:
    return sum(answer.num_preemptions for answer in answers)
