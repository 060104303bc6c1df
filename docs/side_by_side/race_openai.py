"""One question in three wordings; the first short answer ends the others: the openai client."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

WORDINGS = ["What is the capital of {}? One word, please.", "Describe {}.", "Tell me about {}."]


async def ask(client, messages, max_tokens):
    answer = await client.chat.completions.create(
        model="demo", messages=messages, max_tokens=max_tokens, temperature=0
    )
    content = answer.choices[0].message.content
    return content, [*messages, {"role": "assistant", "content": content}]


async def first_short(client, conversations):
    tasks = [asyncio.create_task(ask(client, each, max_tokens=48)) for each in conversations]
    try:
        for done in asyncio.as_completed(tasks):
            answer, messages = await done
            if len(answer.split()) <= 3:
                return answer, messages
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise ValueError("no answer is short")


async def capital(client, slots, country):
    async with slots:
        system = {"role": "system", "content": "You are a helpful assistant."}
        conversations = [
            [system, {"role": "user", "content": wording.format(country)}] for wording in WORDINGS
        ]
        answer, messages = await first_short(client, conversations)
        messages.append({"role": "user", "content": "What do people eat there?"})
        dish, messages = await ask(client, messages, max_tokens=24)
        return answer, dish


async def main():
    key = os.environ.get("VLLM_API_KEY", "EMPTY")
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key=key)
    slots = asyncio.Semaphore(8)
    results = await asyncio.gather(*(capital(client, slots, c) for c in ["France", "Japan"]))
    for result in results:
        print(*result)


asyncio.run(main())
