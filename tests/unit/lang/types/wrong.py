"""Wrong programs: type checkers reject each line marked ``wrong``, with mypy's and pyright's error.

`test_types.py` runs them over this file.
"""

from __future__ import annotations

import sgl_vllm as sgl


@sgl.function
def story(s: sgl.ProgramState, animal: str, length: int = 3) -> str:
    legs = sgl.gen("legs", dtype=int)
    s += "Legs: " + legs
    s[legs].strip()  # wrong: attr-defined, reportAttributeAccessIssue
    s += 3  # wrong: arg-type, reportOperatorIssue
    return s[legs]  # wrong: return-value, reportReturnType


@sgl.function  # wrong: arg-type, reportArgumentType
def no_prompt() -> None: ...


@sgl.function  # wrong: arg-type, reportArgumentType
def another_prompt(s: str) -> None: ...


@sgl.function
async def reader(s: sgl.AsyncProgramState) -> int:
    s += sgl.gen("answer")
    text: str = s.text()  # wrong: assignment, reportAssignmentType
    return len(text)


# The program's arguments.
story.run(3)  # wrong: call-overload, reportArgumentType
story.run()  # wrong: call-overload, reportCallIssue
story.run("hare", lenght=5)  # wrong: call-overload, reportCallIssue
story("hare", 5, 7)  # wrong: call-overload, reportCallIssue
story.item("hare", length="5")  # wrong: arg-type, reportArgumentType

# Options of a run.
story.run("hare", temprature=0)  # wrong: call-overload, reportCallIssue
story.run("hare", temperature="low")  # wrong: call-overload, reportArgumentType
story.run_batch([("hare",)], temprature=0)  # wrong: call-overload, reportCallIssue
story.with_options(temprature=0)  # wrong: call-arg, reportCallIssue
story.with_options(temperature="low")  # wrong: arg-type, reportArgumentType
story.with_options(temperature=0).run(3)  # wrong: arg-type, reportArgumentType
story.with_options(temperature=0).run("hare", lenght=5)  # wrong: call-arg, reportCallIssue

# The result.
story.run("hare").ret_value + 1  # wrong: operator, reportOperatorIssue
len(story.run("hare").ret_value.name)  # wrong: attr-defined, reportAttributeAccessIssue

# Arguments of an expression.
sgl.gen("answer", max_token=16)  # wrong: call-arg, reportCallIssue
sgl.gen("answer", json_schema=3)  # wrong: arg-type, reportArgumentType
sgl.select("answer", temperature="low")  # wrong: arg-type, reportArgumentType
