"""Essays are judged in three dimensions in parallel, then graded: with the openai client."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

ESSAYS = ["The sea is wide and blue. The trip was wonderful.", "The film was dull."]
DIMENSIONS = ["clarity", "style", "content"]


class Judge:
    def __init__(self, url):
        key = os.environ.get("VLLM_API_KEY", "EMPTY")
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        self.slots = asyncio.Semaphore(8)

    async def ask(self, messages, max_tokens, **extra_body):
        answer = await self.client.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            extra_body=extra_body,
        )
        return answer.choices[0].message.content

    async def ask_score(self, messages):
        return await self.ask(
            messages,
            max_tokens=128,
            add_generation_prompt=False,
            continue_final_message=True,
            structured_outputs={"regex": "[1-5]"},
        )

    async def judge_dimension(self, messages, dimension):
        question = {"role": "user", "content": f"Judge the {dimension} of the text."}
        return await self.ask([*messages, question], max_tokens=24)

    async def judge(self, essay):
        async with self.slots:
            messages = [
                {"role": "system", "content": "You are an expert."},
                {"role": "user", "content": f"Give this text a score from 1 to 5.\n\n{essay}"},
                {"role": "assistant", "content": "The score is "},
            ]
            score = await self.ask_score(messages)
            messages[-1]["content"] += score
            judgments = await asyncio.gather(
                *(self.judge_dimension(messages, dimension) for dimension in DIMENSIONS)
            )
            messages.append({"role": "user", "content": "\n".join(judgments) + "\nWhy?"})
            reason = await self.ask(messages, max_tokens=32)
            return score, judgments, reason


async def main():
    judge = Judge(sys.argv[1])
    for result in await asyncio.gather(*(judge.judge(essay) for essay in ESSAYS)):
        print(*result)


asyncio.run(main())
