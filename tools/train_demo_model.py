"""Trains the demo model that ships in `sgl_vllm/demo/model`, from nothing, on two CPU cores.

    python tools/train_demo_model.py                     # the shipped model, about 20 minutes
    python tools/train_demo_model.py --minutes 5 --out /tmp/small
    python tools/train_demo_model.py --examine sgl_vllm/demo/model

Owns the order of things: text, tokenizer, training, the folder, the examination. Needs torch,
transformers, tokenizers and tqdm. The same seed, steps and workers on the same machine give the
same weights.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.demo_model.network import Network  # noqa: E402
from tools.demo_model.selftest import examine  # noqa: E402
from tools.demo_model.texts import documents, long_documents  # noqa: E402
from tools.demo_model.tokenizer import (  # noqa: E402
    DOCUMENT_END,
    TURN_END,
    save_tokenizer,
    token_id,
    train_tokenizer,
)
from tools.demo_model.training import TrainingPlan, batches, train  # noqa: E402

DEFAULT_FOLDER = ROOT / "sgl_vllm" / "demo" / "model"
STEPS_PER_MINUTE = 100  # on two idle cores, see docs/benchmarks.md
TOKENIZER_DOCUMENTS = 20_000
WRONG_SHOWN = 2


def build(folder: Path, *, steps: int, seed: int, num_workers: int) -> float:
    """Trains and writes a complete model folder; returns the final loss in nats per token."""
    torch.manual_seed(seed)
    network = Network.of()
    tokenizer = train_tokenizer(
        itertools.islice(documents(seed), TOKENIZER_DOCUMENTS), vocab_size=network.config.vocab_size
    )
    plan = TrainingPlan(steps=steps)
    streams = {}
    for length, _ in plan.row_lengths:
        texts = (long_documents if length > 512 else documents)(seed + length)
        streams[length] = batches(texts, tokenizer, length, plan.tokens_per_step)
    loss = train(network, plan, streams, num_workers=num_workers)
    write_folder(folder, network, tokenizer)
    return loss


def write_folder(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Writes what `transformers` and vLLM need to load the model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder, max_length_tokens=network.config.max_position_embeddings)
    document_end, turn_end = (token_id(tokenizer, token) for token in (DOCUMENT_END, TURN_END))
    network.save(folder, document_end=document_end, turn_end=turn_end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder to write")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help=f"training budget on two idle cores: {STEPS_PER_MINUTE} steps each (default: 20)",
    )
    parser.add_argument("--workers", type=int, default=2, help="cores to use (default: 2)")
    parser.add_argument("--examine", type=Path, metavar="FOLDER", help="only examine this model")
    arguments = parser.parse_args()

    folder = arguments.examine or arguments.out
    if not arguments.examine:
        steps = round(arguments.minutes * STEPS_PER_MINUTE)
        started = time.perf_counter()
        loss = build(folder, steps=steps, seed=0, num_workers=arguments.workers)
        minutes = (time.perf_counter() - started) / 60
        print(f"{folder}: {steps} steps in {minutes:.1f} minutes, final loss {loss:.3f}")
    for score in examine(folder):
        print(f"{score.name:24} {score.right / score.total:7.1%}  {score.right}/{score.total}")
        for expected, given in score.wrong[:WRONG_SHOWN]:
            print(f"    expected {expected!r}\n    given    {given!r}")


if __name__ == "__main__":
    main()
