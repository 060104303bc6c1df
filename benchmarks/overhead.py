"""What the plugin costs where it cannot help: random prompts that share nothing.

    python -m benchmarks.overhead [--model shape:33m] [--off schedule ...] [--rounds 8]

Stock vLLM and vLLM with the plugin run in this process, alternating in rounds of A B B A, with
the same requests; a round's time is the processor time of all threads, which other programs on the
machine disturb least. Each round gives a ratio; the median of them is printed, and their middle
half. A ratio of 1.01 means one percent more processor time with the plugin.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.in_process import prepare_engine_in_this_process
from benchmarks.models import resolve_model
from sgl_vllm.vllm_api.probe import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="shape:33m", help="demo, shape:33m, a folder, ...")
    parser.add_argument("--off", action="append", default=[], choices=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="pairs of rounds")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="per round")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--block-size", type=int, default=32, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()

    prepare_engine_in_this_process()
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    common: dict[str, Any] = {
        "model": str(resolve_model(arguments.model)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": arguments.prompt_tokens + arguments.output_tokens + 1,
        "max_num_seqs": arguments.requests,
        "block_size": arguments.block_size,
        "skip_tokenizer_init": True,
    }
    options = dict.fromkeys(arguments.off, False)
    engines = [LLM(**common), LLM(**common, additional_config={"sgl_vllm": options})]
    vocabulary = engines[0].model_config.get_vocab_size()
    params = SamplingParams(
        temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)

    def pair() -> list[float]:
        """Processor seconds of each engine for the same new requests."""
        prompts = [
            {
                "prompt_token_ids": [
                    rng.randrange(vocabulary) for _ in range(arguments.prompt_tokens)
                ]
            }
            for _ in range(arguments.requests)
        ]
        seconds = [0.0, 0.0]
        answers: list[Any] = [None, None]
        for index in (0, 1, 1, 0):
            engines[index].reset_prefix_cache()
            started = time.process_time()
            outputs = engines[index].generate(prompts, params, use_tqdm=False)
            seconds[index] += time.process_time() - started
            answers[index] = [list(output.outputs[0].token_ids) for output in outputs]
        assert answers[0] == answers[1], "the answers differ"
        return seconds

    pair()
    pairs = [pair() for _ in tqdm(range(arguments.rounds), unit="pair", file=sys.stderr)]
    ratios = sorted(sgl / stock for stock, sgl in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio = statistics.median(ratios)
    print(
        f"no_sharing, {arguments.model}, block {arguments.block_size}, off: "
        f"{', '.join(arguments.off) or 'nothing'}: processor time with the plugin / without "
        f"{ratio:.4f} (middle half {low:.4f} to {high:.4f}, {len(ratios)} pairs)"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"ratio": ratio, "pairs": pairs, "arguments": vars(arguments)}, default=str)
        )


if __name__ == "__main__":
    main()
