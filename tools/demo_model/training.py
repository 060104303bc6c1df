"""Training: packing documents into rows, the optimizers, the schedule, the loop.

Owns nothing that is specific to the demo model's text. A run is a function of the seed and of
`TrainingPlan` (and, to the last bit, of the machine's arithmetic); wall-clock time decides nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from .network import Network
from .tokenizer import DOCUMENT_END, TURN_END, TURN_START, token_id

# Tokens, targets and what carries loss, each of shape (rows, length).
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast to learn. Every step sees `tokens_per_step` tokens.

    Rows grow during the run: short rows are cheaper, long ones teach long contexts. `row_lengths`
    holds (length in tokens, share of the steps), the shares adding up to 1.
    """

    steps: int
    tokens_per_step: int = 2048
    row_lengths: tuple[tuple[int, float], ...] = ((256, 0.7), (512, 0.2), (1024, 0.1))
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    warmup: float = 0.03

    def row_length(self, step: int) -> int:
        end = 0.0
        for length, share in self.row_lengths:
            end += share
            if step < end * self.steps:
                return length
        return self.row_lengths[-1][0]

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then linear decay to nearly zero."""
        progress = step / self.steps
        return min((step + 1) / (self.warmup * self.steps), (1 - progress) / (1 - self.warmup), 1.0)


class TrainedTokens:
    """Decides which tokens of a document carry loss: answers in chats, everything in raw text.

    What a user or a system message says is random and is never generated, so learning to predict
    it would be wasted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.turn_start = token_id(tokenizer, TURN_START)
        self.turn_end = token_id(tokenizer, TURN_END)
        (self.assistant,) = tokenizer.encode("assistant").ids

    def __call__(self, ids: list[int]) -> list[bool]:
        if self.turn_start not in ids:
            return [False] + [True] * (len(ids) - 1)
        trained = []
        inside = False
        turn_begins = 0
        for i, token in enumerate(ids):
            if token == self.turn_start:
                turn_begins = i
                inside = ids[i + 1] == self.assistant
            # <|im_start|> assistant \n come before the answer
            trained.append(inside and i > turn_begins + 2)
            if token == self.turn_end:
                inside = False
        return trained


def rows(
    texts: Iterator[str], tokenizer: Tokenizer, length: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Rows of `length` + 1 tokens, each starting with a fresh document, and what carries loss."""
    decide, document_end = TrainedTokens(tokenizer), token_id(tokenizer, DOCUMENT_END)
    ids: list[int] = []
    trained: list[bool] = []
    while True:
        for encoding in tokenizer.encode_batch(list(itertools.islice(texts, 1024))):
            flags = decide(encoding.ids)
            ids += [*encoding.ids, document_end]
            trained += [*flags, flags[-1]]
            if len(ids) > length:
                yield ids[: length + 1], trained[: length + 1]
                ids, trained = [], []


def batches(
    texts: Iterator[str], tokenizer: Tokenizer, length: int, tokens_per_step: int
) -> Iterator[Batch]:
    """Endless, of `tokens_per_step` tokens each."""
    stream = rows(texts, tokenizer, length)
    while True:
        batch = list(itertools.islice(stream, tokens_per_step // length))
        ids = torch.from_numpy(np.array([row for row, _ in batch]))
        trained = torch.from_numpy(np.array([flags for _, flags in batch]))
        yield ids[:, :-1], ids[:, 1:], trained[:, 1:]


class Muon:
    """Momentum whose update is orthogonalized (Jordan et al. 2024), for the 2-D hidden weights.

    In float32, unlike `torch.optim.Muon`, because CPUs are slow in bfloat16. Weights of equal shape
    are updated together.
    """

    def __init__(self, weights: list[nn.Parameter], momentum: float = 0.95) -> None:
        shapes = dict.fromkeys(weight.shape for weight in weights)
        self._stacks = [[one for one in weights if one.shape == shape] for shape in shapes]
        self._momenta = [torch.stack([torch.zeros_like(w) for w in s]) for s in self._stacks]
        self._momentum = momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for weights, momentum in zip(self._stacks, self._momenta, strict=True):
            gradient = torch.stack([weight.grad for weight in weights])
            momentum.lerp_(gradient, 1 - self._momentum)
            updates = orthogonalized(gradient.lerp(momentum, self._momentum))
            scale = max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
            for weight, update in zip(weights, updates, strict=True):
                weight.add_(update, alpha=-lr * scale)
                weight.grad = None


def orthogonalized(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Each (rows, columns) matrix of the stack with its singular values moved close to 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class GradientWorkers:
    """Computes gradients with one thread per core, each on its share of a batch's rows.

    Torch's own way, many threads inside each operation, waits at every operation for the slowest
    core; on a machine that others use too that was measured to be four times slower.
    """

    def __init__(self, network: Network, num_workers: int) -> None:
        self.network = network
        self.replicas = [network] + [copy.deepcopy(network) for _ in range(num_workers - 1)]
        for replica in self.replicas[1:]:
            for weight, shared in zip(replica.parameters(), network.parameters(), strict=True):
                weight.data = shared.data
        self.pool = ThreadPoolExecutor(num_workers)

    def __enter__(self) -> GradientWorkers:
        self.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        torch.set_num_threads(self.num_threads)

    def backward(self, tokens: Tensor, targets: Tensor, trained: Tensor) -> float:
        """Leaves the mean gradient in the network's `grad`s and returns the mean loss."""
        parts = (part.tensor_split(len(self.replicas)) for part in (tokens, targets, trained))
        shares = zip(*parts, strict=True)
        losses = list(self.pool.map(self._backward_share, self.replicas, shares))
        for weights in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            total = weights[0].grad
            for weight in weights[1:]:
                total += weight.grad
                weight.grad = None
            total /= len(weights)
        return sum(losses) / len(losses)

    @staticmethod
    def _backward_share(replica: Network, share: Batch) -> float:
        loss = replica.loss(*share)
        loss.backward()
        return loss.item()


def train(
    network: Network,
    plan: TrainingPlan,
    streams: Mapping[int, Iterator[Batch]],
    *,
    num_workers: int = 2,
) -> float:
    """Trains in place and returns the mean loss of the last 50 steps, in nats per trained token.

    `streams` has batches for every length of the plan's rows.
    """
    hidden = [one for one in network.model.layers.parameters() if one.dim() == 2]
    others = [one for one in network.parameters() if not any(one is other for other in hidden)]
    muon = Muon(hidden)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    losses: list[float] = []
    with GradientWorkers(network, num_workers) as workers:
        bar = tqdm(range(plan.steps), desc="training", unit="step")
        for step in bar:
            losses.append(workers.backward(*next(streams[plan.row_length(step)])))
            muon.step(plan.muon_lr * plan.lr_factor(step))
            adam.param_groups[0]["lr"] = plan.adam_lr * plan.lr_factor(step)
            adam.step()
            adam.zero_grad()
            bar.set_postfix(loss=f"{np.mean(losses[-50:]):.4f}", refresh=False)
    return float(np.mean(losses[-50:]))
