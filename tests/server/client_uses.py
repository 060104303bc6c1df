"""What each client is typically used for, beyond its program in docs/clients.md.

Each function gets the names of that program, or the page's command with the words to replace, and
returns the answers. It runs in the client's environment: see `tools/clients`.
"""

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

Names = dict[str, Any]

RULE = "Rule {}: answer a question about a city or a country in one short sentence."
SYSTEM = " ".join(["You are a helpful assistant.", *map(RULE.format, range(9))])
FOOD, TIP = "What do people eat there?", "Give one tip about museums in France."


class Place(BaseModel):
    """A place."""

    name: Literal["Paris", "Lima"]
    continent: Literal["Europe", "America"]
    is_capital: bool


def weather(city: Literal["Paris", "Lima"]) -> str:
    """The weather in a city.

    Args:
        city: the city's name.
    """
    return f"It is sunny in {city}."


CITY = {"type": "string", "enum": ["Paris", "Lima"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "weather"}}
COLD: Any = {"temperature": 0, "max_tokens": 128}


def chat(*texts: str) -> list[dict[str, str]]:
    users = [{"role": "user", "content": text} for text in texts]
    return [{"role": "system", "content": SYSTEM}, *users]


def _of_completions(create: Callable[..., Any], ask: Names) -> list[Any]:
    """Chats, a stream, and calls of a tool, by the function of openai and litellm."""
    chats = [create(**ask, messages=chat(text)).choices[0].message.content for text in (FOOD, TIP)]
    stream = create(**ask, messages=chat(FOOD, TIP), stream=True)
    streamed = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    called = [
        create(**ask, messages=chat(TIP), tools=[TOOL], tool_choice=choice).choices[0].message
        for choice in ("auto", "required", CALL)
    ]
    calls = [[call.function.arguments for call in one.tool_calls or []] for one in called]
    return [*chats, "".join(streamed), calls]


def openai(page: Names) -> Any:
    completions = page["client"].chat.completions
    ask = {"model": page["MODEL"], **COLD}
    parsed = completions.parse(**ask, messages=chat(TIP), response_format=Place)
    responses = page["client"].responses
    response = responses.create(model=page["MODEL"], input=TIP, instructions=SYSTEM, temperature=0)
    text = page["client"].completions.create(**ask, prompt=SYSTEM).choices[0].text
    place = parsed.choices[0].message.parsed.model_dump()
    return [_of_completions(completions.create, ask), place, response.output_text, text]


def litellm(page: Names) -> Any:
    create, ask = page["litellm"].completion, {**page["server"], **COLD}
    place = create(**ask, messages=chat(TIP), response_format=Place).choices[0].message.content
    return [_of_completions(create, ask), Place.model_validate_json(place).model_dump()]


def instructor(page: Names) -> Any:
    answers = []
    for mode in (page["instructor"].Mode.JSON_SCHEMA, page["instructor"].Mode.TOOLS):
        server = page["OpenAI"](base_url=page["URL"], api_key=page["KEY"])
        client = page["instructor"].from_openai(server, mode=mode)
        ask = {"model": page["MODEL"], "response_model": Place, "temperature": 0}
        answers += [client.create(**ask, messages=chat(text)) for text in (FOOD, TIP)]
        answers += list(client.create_partial(**ask, messages=chat(FOOD, TIP)))[-1:]
    return [one.model_dump() for one in answers]


def langchain_openai(page: Names) -> Any:
    llm, messages = page["llm"], [chat(FOOD), chat(TIP)]
    methods = ("json_schema", "function_calling")
    structured = [llm.with_structured_output(Place, method=method) for method in methods]
    places = [one.model_dump() for runnable in structured for one in runnable.batch(messages)]
    called = llm.bind_tools([TOOL], tool_choice="weather").invoke(messages[0]).tool_calls
    streamed = "".join(chunk.content for chunk in llm.stream(messages[1]))
    return [places, [one["args"] for one in called], streamed]


def langchain_json_mode(page: Names) -> Any:
    ask = chat('Answer in JSON, such as {"name": "Paris", "country": "France"}.')
    return page["llm"].with_structured_output(None, method="json_mode").invoke(ask)


def openai_agents(page: Names) -> Any:
    from agents import Agent, ModelSettings, Runner, function_tool

    same = {"model": page["model"], "instructions": SYSTEM}
    typed = Agent("typed", output_type=Place, model_settings=ModelSettings(**COLD), **same)
    settings = ModelSettings(**COLD, tool_choice="required")
    caller = Agent("caller", tools=[function_tool(weather)], model_settings=settings, **same)

    async def streamed() -> list[str]:
        run = Runner.run_streamed(caller, TIP)
        return [event.type async for event in run.stream_events()]

    loop = asyncio.get_event_loop_policy().get_event_loop()  # that of `run_sync`
    called = Runner.run_sync(caller, FOOD)
    place = Runner.run_sync(typed, TIP).final_output.model_dump()
    types = [one.type for one in called.new_items]
    return [place, called.final_output, types, sorted(set(loop.run_until_complete(streamed())))]


def pydantic_ai(page: Names) -> Any:
    from pydantic_ai import Agent, NativeOutput

    kinds = (NativeOutput(Place), Place, str)
    same = {"instructions": SYSTEM, "model_settings": COLD}
    *typed, plain = [Agent(page["model"], output_type=kind, **same) for kind in kinds]

    async def streamed() -> str:
        async with plain.run_stream(TIP) as run:
            return await run.get_output()

    places = [agent.run_sync(TIP).output.model_dump() for agent in typed]
    first = plain.run_sync(page["QUESTION"])
    second = plain.run_sync(FOOD, message_history=first.all_messages())
    return [places, asyncio.run(streamed()), first.output, second.output]


def llama_index(page: Names) -> Any:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool

    llm = page["llm"]
    history = [page["ChatMessage"](one["content"], role=one["role"]) for one in chat(FOOD)]
    *_, last = llm.stream_chat(history)
    place = llm.structured_predict(Place, PromptTemplate(f"{SYSTEM} {TIP}"))
    tools = [FunctionTool.from_defaults(weather)]
    called = llm.chat_with_tools(tools, TIP, chat_history=history, tool_required=True)
    calls = [one.tool_kwargs for one in llm.get_tool_calls_from_response(called)]
    return [last.message.content, place.model_dump(), calls]


def dspy(page: Names) -> Any:
    dspy = page["dspy"]
    fields = {"question": (str, dspy.InputField()), "place": (Place, dspy.OutputField())}
    find = dspy.Predict(dspy.Signature(fields, SYSTEM))
    return [find(question=text).place.model_dump() for text in (FOOD, TIP)]


def outlines(page: Names) -> Any:
    kinds = (
        Place,
        Literal["Paris", "Lima"],
        page["outlines"].types.Regex("[A-Z][a-z]{3,6} is old"),
    )
    answers = [page["model"](f"{SYSTEM} {TIP}", kind, **COLD) for kind in kinds]
    return [*answers, "".join(page["model"].stream(f"{SYSTEM} {TIP}", Place, **COLD))]


def inspect_ai(page: Names) -> Any:
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.scorer import choice
    from inspect_ai.solver import multiple_choice, system_message
    from inspect_ai.util import json_schema

    cities = ["Paris", "Lima", "Oslo"]
    samples = [page["Sample"](text, choices=cities, target="A") for text in (FOOD, TIP)]
    schema = ResponseSchema(name="place", json_schema=json_schema(Place))
    answers = []
    for config in (GenerateConfig(), GenerateConfig(response_schema=schema)):
        solver = [system_message(SYSTEM), multiple_choice()]
        task = page["Task"](samples, solver=solver, scorer=choice(), config=config)
        (log,) = page["eval"](task, **page["server"], **COLD, display="none")
        assert log.status == "success", log.error
        answers += [one.output.completion for one in log.samples]
    return answers


def guidance(page: Names) -> Any:
    import guidance
    from guidance import assistant, gen, select, system, user

    lm = page["start"]
    asked = {
        "word": "It is " + gen("word", regex="[A-Z][a-z]{3,6}") + ".",
        "dish": select(["bread", "rice"], name="dish"),
        "place": guidance.json("place", schema=Place),
    }
    with system():
        lm += SYSTEM
    for question, answer in zip((TIP, FOOD, TIP), asked.values(), strict=True):
        with user():
            lm += question
        with assistant():
            lm += answer
    return [lm[name] for name in asked]


def lm_eval(command: str, words: Names) -> Any:
    from lm_eval.__main__ import cli_evaluate

    rows = [{"q": f"{n}. {TIP}", "choices": ["Paris is old", "rice", "bread"]} for n in range(4)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(Path("rows.jsonl").absolute())}},
        "output_type": "multiple_choice",
        "description": f"{SYSTEM} ",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    Path("choices.yaml").write_text(json.dumps(task))
    words["TASK"] = "choices --include_path . --log_samples --output_path ."
    _console(command, words, cli_evaluate)
    (samples,) = Path().rglob("samples_*.jsonl")
    lines = map(json.loads, samples.read_text().splitlines())
    return [float(one[0]) for line in lines for one in line["filtered_resps"]]


def guidellm(command: str, words: Names) -> Any:
    sys.path.append(os.environ["WITH_TORCH"])
    from guidellm.__main__ import cli

    data = "kind=synthetic_text,prompt_tokens=64,output_tokens=8,prefix_tokens=300"
    more = "--constraint kind=max_requests,count=8 --profile kind=concurrent,streams=2"
    command = f"{command} --data {data} --tokenizer kind=hf_auto,model={words['MODEL_PATH']} {more}"
    _console(f"{command} --output kind=json,path=report.json --disable-progress", words, cli)
    report = json.loads(Path("report.json").read_text())
    return [one["metrics"]["request_totals"] for one in report["benchmarks"]]


def vllm_bench_serve(command: str, words: Names) -> Any:
    from vllm.entrypoints.cli.main import main

    size = "--num-prompts 8 --random-input-len 40 --random-output-len 16 --random-prefix-len 300"
    output = "--save-result --save-detailed --result-filename result.json"
    _console(f"{command} {size} {output} --temperature 0 --max-concurrency 1", words, main)
    report = json.loads(Path("result.json").read_text())
    return [report["completed"], report["generated_texts"]]


def _console(command: str, words: Names, entry: Callable[[], Any]) -> None:
    """Run the command in this process, where imports are paid once."""
    command = re.sub(rf"\b({'|'.join(words)})\b", lambda word: words[word[0]], command)
    sys.argv = shlex.split(command.replace("\\\n", "").replace("\n", ""))
    while "=" in sys.argv[0]:
        name, _, value = sys.argv.pop(0).partition("=")
        os.environ[name] = value
    try:
        entry()
    except SystemExit as end:
        assert not end.code, (sys.argv, end.code)
