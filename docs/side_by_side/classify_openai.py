"""Few-shot classification by the likeliest label, many texts at a time: with the openai client."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

EXAMPLES = [
    ("The film was wonderful.", "positive"),
    ("The soup was terrible.", "negative"),
    ("I found the book lovely.", "positive"),
    ("This hotel is dull.", "negative"),
]
REVIEWS = ["I love this book.", "The game was boring.", "What an excellent trip!"]
LABELS = [" positive", " negative"]


def prompt_of(review):
    shots = "".join(f"Review: {text}\nSentiment: {label}\n" for text, label in EXAMPLES)
    return f"{shots}Review: {review}\nSentiment:"


def mean_logprob(choice, start):
    """Of the tokens that come after `start` characters of the prompt."""
    tokens = zip(choice.logprobs.text_offset, choice.logprobs.token_logprobs, strict=True)
    logprobs = [logprob for offset, logprob in tokens if offset >= start]
    return sum(logprobs) / len(logprobs)


async def classify(client, slots, review):
    prompt = prompt_of(review)
    async with slots:
        scored = await client.completions.create(
            model="demo",
            prompt=[prompt + label for label in LABELS],
            max_tokens=0,
            echo=True,
            logprobs=0,
            temperature=0,
        )
    scores = [mean_logprob(choice, len(prompt)) for choice in scored.choices]
    return LABELS[scores.index(max(scores))], scores


async def main():
    key = os.environ.get("VLLM_API_KEY", "EMPTY")
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key=key)
    slots = asyncio.Semaphore(8)
    results = await asyncio.gather(*(classify(client, slots, review) for review in REVIEWS))
    for label, scores in results:
        print(label, *(f"{score:.2f}" for score in scores))


asyncio.run(main())
