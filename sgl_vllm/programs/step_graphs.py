"""What a program still has to compute, as far as its graph and earlier runs tell.

Owns the graphs that requests have sent, and how many tokens each of their steps takes. Does not own
the form of graphs (`protocol/step_graph.py`), nor what is done about it (`scheduler/orders.py`).
Pure.

What one tenant sends is of no effect on another: graphs are known, and steps are measured, for each
tenant by itself, and the tenant that has the most of them loses its oldest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl_vllm.lru_per_tenant import LruPerTenant
from sgl_vllm.protocol.hints import Hints
from sgl_vllm.protocol.request_keys import GRAPH, STEP
from sgl_vllm.protocol.step_graph import StepGraph, digest_of, read_graph
from sgl_vllm.radix.node import Namespace

logger = logging.getLogger("vllm.sgl_vllm.hints")

MAX_GRAPHS = 128
"""At most this many graphs are known, those used last. One takes up to 40 kB."""

MEMORY = 32
"""A step's mean counts as that of at most this many runs, so that old ones are forgotten."""


class _GraphKey(NamedTuple):
    tenant: Namespace
    digest: str


class MeasuredGraph:
    """What is used of a graph, and how many tokens its steps take: those of the prompt that are not
    cached, and those of the answer.

    Attributes:
        next_tools: by step, what runs after its answer (`StepGraph.next_tool`).
        forks: by step, which fork it is a branch of (`StepGraph.fork_of`).
        remains: shape (steps, steps). `[i, j]`: j may still run, or have to, when i begins.
        mean_tokens, num_measured: by step, of its runs.
    """

    def __init__(self, graph: StepGraph) -> None:
        num_steps = len(graph.steps)
        self.next_tools = tuple(map(graph.next_tool, range(num_steps)))
        self.forks = tuple(map(graph.fork_of, range(num_steps)))
        self.remains = np.ones((num_steps, num_steps), bool)
        for index, step in enumerate(graph.steps):
            before = list(step.needs)
            self.remains[index] = self.remains[before].all(axis=0)
            self.remains[index, before] = False
        self.mean_tokens = np.zeros(num_steps)
        self.num_measured = np.zeros(num_steps)


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step of a graph that the server knows."""

    graph: MeasuredGraph
    index: int

    @property
    def next_tool(self) -> str | None:
        return self.graph.next_tools[self.index]

    @property
    def fork(self) -> int | None:
        return self.graph.forks[self.index]

    def ended(self, num_tokens: int) -> None:
        """It has taken `num_tokens`."""
        graph, index = self.graph, self.index
        graph.num_measured[index] = min(graph.num_measured[index] + 1, MEMORY)
        error = num_tokens - graph.mean_tokens[index]
        graph.mean_tokens[index] += error / graph.num_measured[index]

    @property
    def remaining_tokens(self) -> int | None:
        """How many tokens it and the steps that may still follow are expected to take; None if no
        step was measured. Steps that were not count as the mean of the others."""
        is_measured = self.graph.num_measured > 0
        if not is_measured.any():
            return None
        means = self.graph.mean_tokens
        means = np.where(is_measured, means, means[is_measured].mean())
        return int(means[self.graph.remains[self.index]].sum())


_NOT_READABLE = StepGraph(())
"""Stands for a text that is no graph, so that it is read once only."""


class StepGraphs:
    """The graphs that requests of one engine have sent."""

    def __init__(self) -> None:
        self._graphs: LruPerTenant[_GraphKey, MeasuredGraph] = LruPerTenant(MAX_GRAPHS)

    def __len__(self) -> int:
        return len(self._graphs)

    def step_of(self, tenant: Namespace, hints: Hints) -> KnownStep | None:
        """The step that a request names; None if it names none, or none of a known graph. It costs
        a microsecond, and a graph that is new up to 2 ms."""
        if hints.step is None:
            return None
        key = _GraphKey(tenant, hints.step.digest)
        known = self._graphs.get(key)
        if known is None:
            if hints.graph is None:
                return None
            if digest_of(hints.graph) != key.digest:
                logger.warning("%s is ignored: its digest is not that in %s", GRAPH, STEP)
                return None
            known = MeasuredGraph(_read(hints.graph))
        self._graphs.put(key, known)
        index = hints.step.index
        return KnownStep(known, index) if index < len(known.forks) else None


def _read(text: str) -> StepGraph:
    try:
        return read_graph(text)
    except ValueError as error:
        logger.warning("%s is ignored: %s", GRAPH, error)
        return _NOT_READABLE
