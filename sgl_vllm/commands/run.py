"""`sgl-vllm run`: runs a program from a file, with arguments from the command line.

Owns loading the file, finding the program, its arguments, and the output. Running the program is
the language's job.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic_core import to_jsonable_python

from sgl_vllm.commands.arguments import DEFAULT_URL, URL_VARIABLE, ApiKey, argument, flag, option
from sgl_vllm.commands.terminal import CommandError, Misused
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.replay import Recorder, Replay
from sgl_vllm.lang.backends.vllm import VLLM
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.options import Options
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.sampling import SamplingDefaults
from sgl_vllm.lang.settings import chosen_backend, global_config
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.view import show, to_page
from sgl_vllm.pages import visible

MODULE_NAME = "sgl_vllm_program"
"""The file's ``__name__``: not ``__main__``, so that the file's own main part does not run."""

DESCRIPTION = """\
Runs a @function of a Python file, with arguments from --var. Before that, the
whole file runs, except its `if __name__ == "__main__":` part.

examples:
  sgl-vllm run story.py --var animal=hare
  sgl-vllm run story.py --var animal=hare --stream
  sgl-vllm run story.py --vars hare.json --temperature 0 --json
  sgl-vllm run judge.py --batch essays.jsonl --json > grades.jsonl
  sgl-vllm run story.py --var animal=hare --html run.html
  sgl-vllm run story.py --var animal=hare --record run.jsonl
  sgl-vllm run story.py --var animal=hare --replay run.jsonl

exit status: 0 on success, 1 if the program or the server failed, 2 for
invalid arguments.
"""


PROGRAM, SERVER, OUTPUT = "Arguments of the program", "Server and sampling", "Output"


def command(
    file: Annotated[Path, argument("FILE", "A Python file with a @function.")],
    program: Annotated[
        str | None, option("NAME", "The program to run, if there are several.", panel=PROGRAM)
    ] = None,
    var: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "One argument, parsed as JSON or else taken as text: --var n=3 --var word=hare.",
            panel=PROGRAM,
        ),
    ] = None,
    vars: Annotated[
        Path | None, option("FILE", "A JSON object of arguments.", panel=PROGRAM)
    ] = None,
    batch: Annotated[
        Path | None, option("FILE", "Run once per line, a JSON object of arguments.", panel=PROGRAM)
    ] = None,
    url: Annotated[
        str | None,
        option(
            "URL",
            f"The server (default: ${URL_VARIABLE}, or the backend that the file sets, or "
            f"{DEFAULT_URL}).",
            panel=SERVER,
        ),
    ] = None,
    api_key: ApiKey = None,
    temperature: Annotated[
        float | None, option("T", "Default for every gen.", panel=SERVER)
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("N", "Default for every gen.", panel=SERVER)
    ] = None,
    record: Annotated[Path | None, option("FILE", "Record the run to FILE.", panel=SERVER)] = None,
    replay: Annotated[
        Path | None, option("FILE", "Replay FILE; uses no server.", panel=SERVER)
    ] = None,
    stream: Annotated[bool, flag("--stream", "Show the text as it arrives.", panel=OUTPUT)] = False,
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "Print variables, text, messages, usage and ret_value as JSON, a line per batch item.",
            panel=OUTPUT,
        ),
    ] = False,
    html: Annotated[
        Path | None, option("FILE", "Also write the run as an HTML page.", panel=OUTPUT)
    ] = None,
) -> None:
    if record is not None and replay is not None:
        raise Misused("--record cannot be used with --replay")
    if stream and as_json:
        raise Misused("--stream cannot be used with --json")
    if batch is not None and (stream or html is not None):
        raise Misused("--batch cannot be used with --stream or --html, which show one run")
    chosen = chosen_program(load(file), program)
    common = variables_of(vars, var or [])
    sampling: SamplingDefaults = {}
    if temperature is not None:
        sampling["temperature"] = temperature
    if max_new_tokens is not None:
        sampling["max_new_tokens"] = max_new_tokens
    with ExitStack() as stack:
        try:
            options = Options.of(sampling).sampling
            if html is not None:
                html.open("a").close()  # finds a bad path before the run
            backend = Replay(replay) if replay is not None else _server_at(url, api_key)
            if record is not None:
                backend = stack.enter_context(Recorder(backend, record))
        except ValueError as error:
            raise Misused(str(error)) from None
        if batch is not None:
            _run_batch(chosen, _items(chosen, common, batch), backend, sampling, file, as_json)
        else:
            _check_arguments(chosen, common, "")
            bound = chosen.bind(**common)
            state = bound._new_state(backend, options, is_streamed=stream)
            bound._call_beside(state)  # so its state can be shown even if the run fails
            with suppress(Exception):  # which the outcome tells
                for piece in state.text_iter() if stream else ():
                    print(visible(piece), end="", flush=True)
            failure = _outcome(state, file)
            if as_json:
                print(json.dumps(to_json(chosen, state, failure), ensure_ascii=False))
            elif stream:
                print(f"\n{state.usage}")
            else:
                show(state)
            if html is not None:
                page = to_page(state, f"{chosen.func.__name__} of {file.name}")
                html.write_text(page, encoding="utf-8")
            if failure is not None:
                raise CommandError(failure)


# --- the program ---------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """The file as a module named `MODULE_NAME`, which can import from its own directory."""
    if not path.is_file():
        raise Misused(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise Misused(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pydantic look it up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        what = f"{path} cannot be loaded: {_described(error, path)}"
        if not isinstance(error, SyntaxError | ImportError):
            what += '. Put the code that runs the program under `if __name__ == "__main__":`'
        raise CommandError(what) from error
    return module


def chosen_program(module: ModuleType, name: str | None) -> Program:
    """The program called `name`, or the only one. The file's own programs have precedence over
    imported ones."""
    found = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    own = {key: p for key, p in found.items() if p.func.__module__ == module.__name__}
    file = Path(str(module.__file__)).name
    if name is not None:
        if name not in found:
            raise Misused(f"{file} has no program {name}; it has: {', '.join(found) or 'none'}")
        return found[name]
    candidates = own or found
    if not candidates:
        raise Misused(f"{file} has no program: decorate a function with @sgl.function")
    if len(candidates) > 1:
        names = ", ".join(candidates)
        raise Misused(f"{file} has several programs, choose one with --program: {names}")
    return next(iter(candidates.values()))


def variables_of(file: Path | None, pairs: Sequence[str]) -> dict[str, object]:
    """The arguments of --vars, overridden by those of --var."""
    variables: dict[str, object] = {}
    if file is not None:
        variables |= _json_object(_read(file), str(file))
    for given in pairs:
        name, sign, value = given.partition("=")
        if not sign or not name:
            raise Misused(f"--var needs NAME=VALUE, not {given!r}")
        try:
            variables[name] = json.loads(value, parse_constant=_no_constant)
        except ValueError:
            variables[name] = value
    return variables


def _no_constant(text: str) -> float:
    """NaN and Infinity are not JSON, so they are taken as text."""
    raise ValueError(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Misused(f"{path} is not UTF-8") from None


def _json_object(text: str, where: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Misused(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Misused(f"{where} is not a JSON object of arguments")
    return value


def _check_arguments(program: Program, given: Mapping[str, object], where: str) -> None:
    signature = inspect.signature(program.func)
    try:
        signature.bind(None, **{**program.bound, **given})
    except TypeError as error:
        raise Misused(
            f"{program.func.__name__}{signature}: {error}{where}. Set arguments with --var "
            "NAME=VALUE"
        ) from None


def _server_at(url: str | None, api_key: str | None) -> Backend:
    url = url or os.environ.get(URL_VARIABLE)
    if not url and global_config.default_backend is not None:
        return chosen_backend(None)
    return VLLM(url or DEFAULT_URL, api_key=api_key)


# --- running -------------------------------------------------------------------------------------


def _outcome(state: ProgramState, file: Path) -> str | None:
    """Wait for the whole run. Returns its error in one line, or None."""
    run = state._stream.run
    try:
        state._wait_for_function()
        run.background.run_blocking(run.all_ended)
    except Exception as error:
        return _failure(error, file)
    except KeyboardInterrupt:
        run.cancel()
        raise
    return None


def _items(program: Program, common: dict[str, object], path: Path) -> list[dict[str, object]]:
    """The arguments of each run of a batch."""
    items = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            where = f"line {number} of {path}"
            item = {**common, **_json_object(line, where)}
            _check_arguments(program, item, f" ({where})")
            items.append(item)
    if not items:
        raise Misused(f"{path} is empty")
    return items


def _run_batch(
    program: Program,
    items: list[dict[str, object]],
    backend: Backend,
    sampling: SamplingDefaults,
    file: Path,
    as_json: bool,
) -> None:
    results: Sequence[ProgramState | BaseException] = program.run_batch(
        items, backend=backend, progress_bar=True, return_errors=True, **sampling
    )
    num_failed = 0
    for number, result in enumerate(results, start=1):
        if isinstance(result, BaseException):
            num_failed += 1
            failure = _failure(result, file)
            print(json.dumps({"error": failure}) if as_json else f"{number}: ✗ {failure}")
        elif as_json:
            print(json.dumps(to_json(program, result, None), ensure_ascii=False))
        else:
            shown = json.dumps(_plain(_values_of(result)), ensure_ascii=False)
            print(f"{number}: {shown}")
    if num_failed:
        raise CommandError(f"{num_failed} of {len(items)} runs failed")


# --- what is printed -----------------------------------------------------------------------------


def to_json(program: Program, state: ProgramState, failure: str | None) -> dict[str, object]:
    """The state of a finished run as JSON. Values that JSON cannot express become text."""
    transcript = state._stream.snapshot().transcript
    shown = {
        "program": program.func.__name__,
        "variables": _plain(_values_of(state)),
        "text": transcript.text,
        "messages": [message.as_dict() for message in transcript.all_messages()],
        "usage": dataclasses.asdict(state.usage),
        "ret_value": _plain(state.ret_value),
    }
    return shown if failure is None else {**shown, "error": failure}


def _values_of(state: ProgramState) -> dict[str, object]:
    """The variables that have a value."""
    futures = state._stream.variables.items()
    return {
        name: future.result().value
        for name, future in futures
        if future.done() and future.exception() is None
    }


def _plain(value: object) -> object:
    plain: object = to_jsonable_python(
        value, serialize_unknown=True, inf_nan_mode="constants", bytes_mode="base64"
    )
    return plain


def _failure(error: BaseException, file: Path) -> str:
    if isinstance(error, ProgramError):
        return _one_line(str(error))
    return f"the program raised {_described(error, file)}"


def _described(error: BaseException, file: Path) -> str:
    """An error of the user's code: its type, message, and the last line of `file` in its trace."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
    place = f" (line {lines[-1]})" if lines else ""
    message = _one_line(str(error))
    return f"{type(error).__name__}{': ' * bool(message)}{message}{place}"


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
