"""Plays a random program on an engine, and compares what two engines answered.

The reference is played first and to the end: its replies fix every prompt, so that each request of
every other engine is compared on its own. An engine whose requests stop getting anywhere ends with
`Hang` instead of blocking the test.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import RequestOutput

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.protocol.scoring import scored_rows
from tests.engine.engine import Ask, Engine
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.programs import MAX_MODEL_LEN, Call, Phase, Program

HANG_PASSES, HANG_S = 300, 120.0
"""Without a new token of any request: so many forward passes, or so many seconds."""

LOGPROB_TOLERANCE = 1e-3
NEAR_TIE = 1e-4
"""Two logits closer than this may change places when sums are taken in another order."""


class Hang(AssertionError):
    """No request of the engine gets anywhere."""


@dataclass(frozen=True)
class Setting:
    """An engine that programs are played on. `plugin` None is stock vLLM."""

    plugin: dict[str, Any] | None
    caching: bool = True
    block_size: int = 32
    num_blocks: int | None = None
    max_num_batched_tokens: int = 1024
    chunked: bool = True
    max_num_seqs: int = 16
    policy: str = "fcfs"
    async_scheduling: bool | None = None
    """None leaves it to vLLM."""
    grammars_in_background: bool = False
    """As vLLM compiles them; it makes the step in which such a request starts a matter of time."""

    @property
    def is_canonical(self) -> bool:
        """Whether forced text is spelt in one way only."""
        return (
            self.plugin is not None
            and self.plugin.get("jump_forward", True)
            and self.plugin.get("jump_mode", "canonical") == "canonical"
        )

    @property
    def engine_args(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.num_blocks is not None:
            more["num_gpu_blocks_override"] = self.num_blocks
        if self.async_scheduling is not None:
            more["async_scheduling"] = self.async_scheduling
        return {
            "max_model_len": MAX_MODEL_LEN,
            "enable_prefix_caching": self.caching,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_chunked_prefill": self.chunked,
            "max_num_seqs": self.max_num_seqs,
            "scheduling_policy": self.policy,
            "use_tqdm_on_load": False,
            **more,
        }

    def prepare(self, engine: Engine) -> None:
        """What no argument can say, on an engine that has just been started."""
        manager = engine.core.structured_output_manager
        manager._use_async_grammar_compilation = self.grammars_in_background


STOCK_WITHOUT_CACHE = Setting(None, caching=False)
REFERENCE = Setting(None, caching=False, async_scheduling=False)
"""The same, step by step, as decoding one by one needs it."""


@dataclass
class Sample:
    """One of the n replies to a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: tuple[str | None, int | str | None] = (None, None)
    """Finish and stop reason; (None, None) while it runs, or if it was given up."""
    logprobs: list[float] | None = None


@dataclass
class Answer:
    samples: list[Sample]
    prompt_logprobs: list[float] | None = None
    finished: bool = False


@dataclass
class Played:
    """What an engine answered to a program, and what happened on the way."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class References:
    """What the answers to one program must be."""

    narrowed: Played
    stock: Played

    def expected_by(self, setting: Setting, program: Program) -> Played:
        if setting.is_canonical:
            return self.narrowed
        constrained = {c.number for c in program.calls if c.params.structured_outputs is not None}
        answers = {
            number: (self.stock if number in constrained else self.narrowed).answers[number]
            for number in self.narrowed.answers
        }
        return Played(self.narrowed.prompts, answers)


@dataclass(frozen=True)
class Difference:
    """The first thing in which a request's answer is not the reference's."""

    call: Call
    prompt: list[int]
    what: str
    want: Any
    got: Any
    common: list[int] | None = None
    """If tokens differ: those before the first that does."""

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The first two different tokens, if both answers have one there."""
        if self.common is None or len(self.common) >= min(len(self.want), len(self.got)):
            return None
        return self.want[len(self.common)], self.got[len(self.common)]

    def __str__(self) -> str:
        return (
            f"{self.call.shape} {self.call.number}: {self.what} differ\n  want {self.want}\n"
            f"  got  {self.got}\n  prompt of {len(self.prompt)} tokens, {self.call}"
        )


def play(
    engine: Engine, program: Program, prompts: dict[int, list[int]] | None, give_up: bool = True
) -> Played:
    """Run `program` on `engine`.

    Args:
        prompts: those that the reference made of its replies; None makes them of this engine's.
        give_up: whether calls are aborted. A reference plays all to the end.

    Raises:
        Hang: no request got a token for too long.
        AssertionError: something was left when the engine was idle.
    """
    player = _Player(engine, program, prompts, give_up)
    before = _counts(engine)
    for phase in program.phases:
        player.play_phase(phase)
    player.played.counts.update(_counts(engine) - before)
    return player.played


class _Player:
    def __init__(
        self, engine: Engine, program: Program, prompts: dict[int, list[int]] | None, give_up: bool
    ) -> None:
        self._engine = engine
        self._llm = engine.llm.llm_engine
        self._seed = program.seed
        self._prompts = prompts
        self._may_give_up = give_up
        self._by_priority = engine.scheduler.policy.value == "priority"
        self.played = Played()
        self._running: dict[str, tuple[Call, int]] = {}  # by request id, with the step it came in
        self._ended_in: dict[int, int] = {}
        self._passes_at_progress, self._time_of_progress = 0, 0.0
        scheduler, preempt = engine.scheduler, type(engine.scheduler)._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.played.counts["preemptions"] += 1
            preempt(scheduler, *args, **kwargs)

        scheduler._preempt_request = counted

    def play_phase(self, phase: Phase) -> None:
        """Add, step and give up until all calls have ended; then look at what is left."""
        step = 0
        to_come = list(phase.calls)
        self._ended_in = dict.fromkeys(self._ended_in, 0)
        self._made_progress()
        while to_come or self._running:
            due = [call for call in to_come if self._is_due(call, step)]
            to_come = [call for call in to_come if call not in due]
            for call in due:
                self._add(call, step)
            self._give_up(step)
            outputs = self._llm.step()
            step += 1
            for output in outputs:
                self._take(output, step)
            self._check_progress(to_come)
        self._llm.step()  # lets the runner forget what was given up last
        self._engine.check_nothing_is_left()
        if phase.reset_cache_after:
            assert self._engine.llm.reset_prefix_cache()
            self._engine.check_nothing_is_left()

    def _is_due(self, call: Call, step: int) -> bool:
        if not self._ended_in.keys() >= set(call.after):
            return False
        ended_in = [self._ended_in[number] for number in call.after]
        return step >= max(ended_in, default=0) + call.delay

    def _add(self, call: Call, step: int) -> None:
        played = self.played
        if self._prompts is not None:
            prompt = self._prompts[call.number]
        else:
            replies = {n: answer.samples[0].tokens for n, answer in played.answers.items()}
            prompt = call.prompt(played.prompts, replies)
        played.prompts[call.number] = prompt
        played.answers[call.number] = Answer([Sample() for _ in range(call.params.n)])
        request_id = f"{self._seed}-{call.number}"
        self._running[request_id] = (call, step)
        self._llm.add_request(
            request_id,
            Ask(prompt, call.params, call.cache_salt).as_prompt,
            copy.deepcopy(call.params),  # vLLM notes things in it
            priority=call.priority if self._by_priority else 0,
        )
        self._made_progress()

    def _give_up(self, step: int) -> None:
        if not self._may_give_up:
            return
        gone = [
            request_id
            for request_id, (call, added_in) in self._running.items()
            if self._is_to_be_given_up(call, step, added_in)
        ]
        if gone:
            self._llm.abort_request(gone)
            self.played.counts["aborts"] += len(gone)
            self._made_progress()
        for request_id in gone:
            call, _ = self._running.pop(request_id)
            self._ended_in[call.number] = step

    def _is_to_be_given_up(self, call: Call, step: int, added_in: int) -> bool:
        abort = call.abort
        if abort is None:
            return False
        if abort.after_tokens is not None:
            samples = self.played.answers[call.number].samples
            return max(len(sample.tokens) for sample in samples) >= abort.after_tokens
        if abort.after_steps is not None:
            return step >= added_in + abort.after_steps
        assert abort.at_step is not None
        return step >= abort.at_step

    def _take(self, output: RequestOutput, step: int) -> None:
        call, _ = self._running[output.request_id]
        answer = self.played.answers[call.number]
        for completion in output.outputs:
            sample = answer.samples[completion.index]
            tokens = list(completion.token_ids)
            if tokens != sample.tokens or completion.finish_reason is not None:
                self._made_progress()
            sample.tokens, sample.text = tokens, completion.text
            sample.ended = (completion.finish_reason, completion.stop_reason)
            if completion.logprobs is not None:
                sample.logprobs = [
                    row[token].logprob
                    for row, token in zip(completion.logprobs, tokens, strict=True)
                ]
        if output.prompt_logprobs is not None:
            first = (call.params.extra_args or {}).get(SCORE_FROM, 1)
            rows = scored_rows(output.prompt_logprobs, output.prompt_token_ids[first:])
            answer.prompt_logprobs = [row[token].logprob for row, token in rows]
        if output.finished:
            answer.finished = True
            del self._running[output.request_id]
            self._ended_in[call.number] = step

    def _made_progress(self) -> None:
        self._passes_at_progress = self._engine.forward_passes
        self._time_of_progress = time.monotonic()

    def _check_progress(self, to_come: list[Call]) -> None:
        if not self._running:
            self._made_progress()
        passes = self._engine.forward_passes - self._passes_at_progress
        seconds = time.monotonic() - self._time_of_progress
        if passes <= HANG_PASSES and seconds <= HANG_S:
            return
        scheduler = self._engine.scheduler
        requests = [
            f"{request.request_id} {request.status.name}, {request.num_computed_tokens} of "
            f"{request.num_tokens} tokens computed"
            for request in scheduler.requests.values()
        ]
        raise Hang(
            f"no new token in {passes} forward passes and {seconds:.0f} s; seed {self._seed}, "
            f"{len(to_come)} calls to come, "
            f"{scheduler.kv_cache_manager.block_pool.get_num_free_blocks()} free blocks, "
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{len(scheduler.kv_holding_waiting)} of them with blocks:\n" + "\n".join(requests)
        )


def _counts(engine: Engine) -> Counter[str]:
    """What the plugin counted on this engine so far, and the engine's forward passes."""
    counts = Counter({"forward passes": engine.forward_passes})
    if hasattr(engine.scheduler, "sgl_vllm"):
        stats = engine.scheduler.sgl_vllm.stats()
        jumps, radix, order = stats.jump_forward, stats.radix, stats.schedule
        assert jumps is None or not jumps.errors, "jump-forward had an error: see the log"
        counts["partial hits"] = radix.partial_block_hits if radix is not None else 0
        if jumps is not None:
            counts["jumps"] = jumps.jumps
            counts["forced tokens"] = jumps.forced_tokens
            counts["stale tokens"] = jumps.stale_tokens
        counts["select scores"] = stats.select.scored_requests if stats.select is not None else 0
        counts["overtakes"] = order.overtakes if order is not None else 0
    return counts


def references_on(engine: Engine, program: Program) -> References:
    """What a stock engine without a cache answers, which schedules step by step (`REFERENCE`)."""
    with decoding_one_by_one(engine.scheduler):
        narrowed = play(engine, program, None, give_up=False)
    return References(narrowed, play(engine, program, narrowed.prompts, give_up=False))


def differences(
    program: Program, want: Played, got: Played, logprob_tolerance: float = LOGPROB_TOLERANCE
) -> Iterator[Difference]:
    """The first difference of every request whose answer is not the reference's.

    Of a request that was given up, what it had by then must be how the reference begins.
    """
    for call in program.calls:
        prompt = want.prompts[call.number]
        one, other = want.answers[call.number], got.answers[call.number]
        for what, wanted, given, common in _unequal(call, one, other, logprob_tolerance):
            yield Difference(call, prompt, what, wanted, given, common)
            break


def _unequal(
    call: Call, want: Answer, got: Answer, tolerance: float
) -> Iterator[tuple[str, Any, Any, list[int] | None]]:
    for one, other in zip(want.samples, got.samples, strict=True):
        ended = other.ended != (None, None)
        wanted = one.tokens if ended else one.tokens[: len(other.tokens)]
        if wanted != other.tokens:
            pairs = zip(wanted, other.tokens, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            length = min(len(wanted), len(other.tokens)) if same is None else same
            yield "tokens", one.tokens, other.tokens, wanted[:length]
        if ended and one.ended != other.ended:
            yield "finish reasons", one.ended, other.ended, None
        if ended and one.text != other.text:
            yield "texts", one.text, other.text, None
        if not _close(one.logprobs, other.logprobs, ended, tolerance):
            yield "logprobs", one.logprobs, other.logprobs, None
    if call.abort is None and not got.finished:
        yield "ends", "an end", "none", None
    if got.finished and not _close(want.prompt_logprobs, got.prompt_logprobs, True, tolerance):
        yield "prompt logprobs", want.prompt_logprobs, got.prompt_logprobs, None


def _close(
    want: list[float] | None, got: list[float] | None, whole: bool, tolerance: float
) -> bool:
    if want is None or got is None:
        return want is got or not whole
    return (len(want) == len(got) or not whole) and all(
        abs(a - b) <= tolerance for a, b in zip(want, got, strict=False)
    )
