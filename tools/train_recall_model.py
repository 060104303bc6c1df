"""Trains a small model that answers from what is in its context, for `benchmarks.approximate`.

    python tools/train_recall_model.py --out FOLDER       # half an hour on one core

Owns the network's sizes, the rows and the share of right answers; the texts are those of
`benchmarks/recall.py`, the network and the loop those of the demo model. Needs what
`tools/train_demo_model.py` needs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.recall import documents  # noqa: E402
from tools.demo_model.network import Network, NetworkShape  # noqa: E402
from tools.demo_model.tokenizer import DOCUMENT_END, token_id, train_tokenizer  # noqa: E402
from tools.demo_model.training import Batch, TrainingPlan, train  # noqa: E402
from tools.train_demo_model import write_folder  # noqa: E402

SHAPE = NetworkShape(
    vocab_size=832,
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=352,
    head_dim=32,
)
# Rows get longer step by step. What was learned on short ones is lost in much longer ones.
ROW_LENGTHS = (
    (72, 0.2),
    (108, 0.1),
    (144, 0.1),
    (216, 0.1),
    (288, 0.1),
    (432, 0.15),
    (612, 0.1),
    (828, 0.15),
)
# A note has 11 to 14 tokens, and its question with the answer has 4.
TOKENS_PER_NOTE = 18
EXAMINED_ROWS = 8


def batches(
    tokenizer: Tokenizer, length: int, tokens_per_step: int, *, seed: int
) -> Iterator[Batch]:
    """Endless; a row is one document, and its answers carry the loss."""
    stream = documents(seed, length // TOKENS_PER_NOTE)
    end = token_id(tokenizer, DOCUMENT_END)
    num_rows = max(1, tokens_per_step // length)
    while True:
        ids = np.full((num_rows, length + 1), end)
        trained = np.zeros((num_rows, length + 1), dtype=bool)
        for row, parts in enumerate(itertools.islice(stream, num_rows)):
            encoded = tokenizer.encode_batch([text for text, _ in parts])
            flat = [token for one in encoded for token in one.ids][: length + 1]
            flags = [
                is_answer
                for one, (_, is_answer) in zip(encoded, parts, strict=True)
                for _ in one.ids
            ][: length + 1]
            ids[row, : len(flat)] = flat
            trained[row, : len(flags)] = flags
        rows, carried = torch.from_numpy(ids), torch.from_numpy(trained)
        yield rows[:, :-1], rows[:, 1:], carried[:, 1:]


@torch.no_grad()
def share_right(network: Network, batch: Batch) -> float:
    """Of the answers of a batch, how many have the highest logit."""
    tokens, targets, trained = batch
    logits = network.logits(tokens, trained)
    return (logits.argmax(-1) == targets[trained]).float().mean().item()


def build(folder: Path, plan: TrainingPlan, *, seed: int, num_workers: int) -> dict[int, float]:
    """Trains and writes a model folder. Returns the share of right answers by the rows' length."""
    torch.manual_seed(seed)
    texts = ("".join(text for text, _ in parts) for parts in documents(seed, 100))
    tokenizer = train_tokenizer(itertools.islice(texts, 200), vocab_size=SHAPE.vocab_size)
    network = Network(SHAPE)
    streams = {
        length: batches(tokenizer, length, plan.tokens_per_step, seed=seed + length)
        for length, _ in plan.row_lengths
    }
    train(network, plan, streams, num_workers=num_workers)
    write_folder(folder, network, tokenizer)
    network.to(torch.bfloat16).to(torch.float32)  # as it is served
    return {
        length: share_right(
            network, next(batches(tokenizer, length, EXAMINED_ROWS * length, seed=-1 - length))
        )
        for length, _ in plan.row_lengths
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="with 0 it learned far slower")
    parser.add_argument("--steps", type=int, default=5000, help="training steps (default: 5000)")
    parser.add_argument("--workers", type=int, default=2, help="cores to use (default: 2)")
    arguments = parser.parse_args()
    plan = TrainingPlan(
        steps=arguments.steps,
        tokens_per_step=4096,
        row_lengths=ROW_LENGTHS,
    )
    started = time.perf_counter()
    shares = build(arguments.out, plan, seed=arguments.seed, num_workers=arguments.workers)
    minutes = (time.perf_counter() - started) / 60
    print(f"{arguments.out}: {plan.steps} steps in {minutes:.1f} minutes")
    for length, share in shares.items():
        print(f"{length // TOKENS_PER_NOTE:4} notes: {share:.0%} of the answers are right")


if __name__ == "__main__":
    main()
