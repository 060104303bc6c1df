"""An error anywhere in the cache or the queue costs no request, no block, and never the engine.

Each method of their parts raises once, at some call, while a real scheduler serves random requests
in a cache that is too small for them. The slow cases also have it raise at the first and last call.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest

import sgl_vllm.programs
import sgl_vllm.radix
import sgl_vllm.scheduler
from tests.effort import some_nightly
from tests.engine.machine import Machine

ENTRY_POINTS = {
    *("sgl_vllm.radix.pool", "sgl_vllm.radix.manager", "sgl_vllm.radix.allocation"),
    *("sgl_vllm.scheduler.queue", "sgl_vllm.scheduler.scheduler"),
    *("sgl_vllm.scheduler.control", "sgl_vllm.scheduler.assembly", "sgl_vllm.scheduler.step_times"),
}
"""vLLM calls the methods of these modules, so an injected error would be raised into vLLM."""

TRUSTED = {
    *("WaitingRows.add", "WaitingRows.pop", "WaitingRows.discard", "WaitingRows._resize"),
    *("WaitingRows._release", "Groups.in_vllms_order"),
    *("WaitingQueue.discard", "WaitingQueue._forget_order", "_Interned.acquire"),
    *("_Interned.release", "Lookup.step_starts", "Lookup.note_copied", "Lookup.is_waiting"),
    *("ScoredRequests.expect", "ScoredRequests.before_update", "ScoredRequests.after_update"),
    *("ScoredRequests.follows_outputs", "Refusals.follows_outputs", "Programs.arrived"),
    *("Programs.step_starts", "Programs._guarded", "Programs._read_left"),
}
"""The table of waiting requests, which is the queue; and lookups and additions of a line or two."""

NUM_BLOCKS = 40

Target = tuple[type, str]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "every option": {
        "schedule_fair_quantum": 100,
        "schedule_max_wait_s": 1,
        "radix_ttl_s": 0.5,
        "radix_policy": "slru",
    },
    "windows": {"sliding_windows": (64,)},
}


def machine(name: str) -> Machine:
    settings = dict(SETTINGS[name])
    windows = settings.pop("sliding_windows", ())
    return Machine(settings, num_blocks=NUM_BLOCKS, max_num_seqs=4, sliding_windows=windows)


def serve(subject: Machine, seed: int) -> None:
    """Random requests that share prefixes, some of them aborted, in several programs of several
    tenants."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randint(40, 300))] for _ in range(4)]
    for number in range(16):
        prompt = [*rng.choice(prefixes), *[rng.randrange(1000) for _ in range(rng.randint(1, 80))]]
        request = subject.add(
            prompt,
            rng.randint(1, 40),
            cache_salt=rng.choice((None, "a", "b")),
            extra_args={
                "sgl_program": f"p{number % 5}",
                "sgl_fork_group": number % 2,
                "sgl_ends": number % 3 == 0,
                "sgl_next_tool": "search",
            },
        )
        for _ in range(rng.randint(0, 4)):
            subject.step()
        if rng.random() < 0.15 and not request.is_finished():
            subject.abort(request)
    for _ in range(2_000):
        if not subject.scheduler.has_requests():
            break
        subject.step()


def modules() -> Iterator[ModuleType]:
    for package in (sgl_vllm.radix, sgl_vllm.programs, sgl_vllm.scheduler):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in ENTRY_POINTS:
                yield importlib.import_module(found.name)


def methods() -> Iterator[Target]:
    for module in modules():
        for owner in vars(module).values():
            if inspect.isclass(owner) and owner.__module__ == module.__name__:
                for name, value in vars(owner).items():
                    if inspect.isfunction(value) and not name.startswith("__"):
                        yield owner, name


@contextmanager
def replaced(target: Target, make: Callable[[Any], Any]) -> Iterator[None]:
    owner, name = target
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class Injected(Exception):
    """An error that no input can cause."""


def count_calls(setting: str) -> Counter[Target]:
    """How often each method is called."""
    calls: Counter[Target] = Counter()

    def counting(target: Target) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                calls[target] += 1
                return original(*args, **kwargs)

            return counted

        return make

    subject = machine(setting)
    with ExitStack() as stack:
        for target in methods():
            stack.enter_context(replaced(target, counting(target)))
        serve(subject, 0)
    return calls


def raising_at(call: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        left = call

        def raising(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Injected
            return original(*args, **kwargs)

        return raising

    return make


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", some_nightly(SETTINGS, ["default"]))
def test_an_error_in_any_method_ends_nothing_and_leaks_nothing(setting: str) -> None:
    rng = random.Random(1)
    calls = count_calls(setting)
    assert len(calls) > 80
    for target, number in calls.items():
        name = f"{target[0].__name__}.{target[1]}"
        if name in TRUSTED:
            continue
        more = () if setting == "default" else (1, number)
        for call in sorted({rng.randint(1, number), *more}):
            subject = machine(setting)
            try:
                with replaced(target, raising_at(call)):
                    serve(subject, 0)
                subject.check_nothing_is_left()
            except Exception as error:
                raise AssertionError(f"{name}, call {call} of {number}") from error
