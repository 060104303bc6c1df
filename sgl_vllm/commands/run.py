"""`sgl-vllm run`: runs a program from a file, with arguments from the command line.

Owns loading the file, finding the program, its arguments, and the output. Running the program is
the language's job.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import ModuleType

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.replay import Recorder, Replay
from sgl_vllm.lang.backends.vllm import VLLM
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.sampling import SamplingDefaults, run_defaults
from sgl_vllm.lang.settings import chosen_backend, global_config
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.view import live, show, to_page
from sgl_vllm.lang.views.picture import visible

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "SGL_VLLM_URL"
MODULE_NAME = "sgl_vllm_program"
"""The file's ``__name__``: not ``__main__``, so that the file's own main part does not run."""

FAILED, MISUSED = 1, 2

DESCRIPTION = """\
Runs a @function of a Python file, with arguments from --var. The file's own
`if __name__ == "__main__":` part does not run.

examples:
  sgl-vllm run story.py --var animal=hare
  sgl-vllm run story.py --var animal=hare --stream        watch the text arrive
  sgl-vllm run story.py --vars hare.json --temperature 0 --json
  sgl-vllm run judge.py --program judge --batch essays.jsonl --json > grades.jsonl
  sgl-vllm run story.py --var animal=hare --html run.html  write the run as a page
  sgl-vllm run story.py --var animal=hare --record run.jsonl
  sgl-vllm run story.py --var animal=hare --replay run.jsonl   again, without a server

exit status: 0 on success, 1 if the program or the server failed, 2 for invalid arguments.
"""


class RunError(Exception):
    """An error message of one line, and the exit status."""

    def __init__(self, message: str, status: int = MISUSED) -> None:
        super().__init__(message)
        self.status = status


def declare(command: argparse.ArgumentParser) -> None:
    """Add the options of ``sgl-vllm run``."""
    command.add_argument("file", type=Path, metavar="FILE", help="a Python file with a @function")
    command.add_argument(
        "--program", metavar="NAME", help="the program to run, if there are several"
    )

    given = command.add_argument_group("arguments of the program")
    given.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one argument, parsed as JSON or else taken as text: --var n=3 --var word=hare",
    )
    given.add_argument("--vars", type=Path, metavar="FILE", help="a JSON object of arguments")
    given.add_argument(
        "--batch", type=Path, metavar="FILE", help="run once per line, a JSON object of arguments"
    )

    how = command.add_argument_group("server and sampling")
    how.add_argument(
        "--url",
        metavar="URL",
        help=f"the server's URL (default: ${URL_VARIABLE}, or the backend that the file sets, or "
        f"{DEFAULT_URL})",
    )
    how.add_argument(
        "--api-key", metavar="KEY", help="the server's API key (default: $VLLM_API_KEY)"
    )
    how.add_argument("--temperature", type=float, metavar="T", help="default for every gen")
    how.add_argument("--max-new-tokens", type=int, metavar="N", help="default for every gen")
    recording = how.add_mutually_exclusive_group()
    recording.add_argument("--record", type=Path, metavar="FILE", help="record the run to FILE")
    recording.add_argument(
        "--replay", type=Path, metavar="FILE", help="replay FILE; uses no server"
    )

    shown = command.add_argument_group("output")
    form = shown.add_mutually_exclusive_group()
    form.add_argument("--stream", action="store_true", help="show the text as it arrives")
    form.add_argument(
        "--json",
        action="store_true",
        help="print variables, text, messages, usage and ret_value as JSON, a line per batch item",
    )
    shown.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the run as an HTML page"
    )


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status. Errors are one line on standard error."""
    try:
        if options.batch is not None and (options.stream or options.html is not None):
            raise RunError("--batch cannot be used with --stream or --html, which show one run")
        program = chosen_program(load(options.file), options.program)
        common = variables_of(options)
        with ExitStack() as stack:
            backend = _backend_of(options, stack)
            if options.batch is not None:
                return _run_batch(program, common, backend, options)
            return _run_once(program, common, backend, options)
    except RunError as error:
        print(f"sgl-vllm run: {error}", file=sys.stderr)
        return error.status


# --- the program ---------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """The file as a module named `MODULE_NAME`, which can import from its own directory."""
    if not path.is_file():
        raise RunError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise RunError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pydantic look it up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RunError(f"{path} cannot be loaded: {_described(error, path)}", FAILED) from error
    return module


def chosen_program(module: ModuleType, name: str | None) -> Program:
    """The program called `name`, or the only one. The file's own programs have precedence over
    imported ones."""
    found = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    own = {key: p for key, p in found.items() if p.func.__module__ == module.__name__}
    file = Path(str(module.__file__)).name
    if name is not None:
        if name not in found:
            raise RunError(f"{file} has no program {name}; it has: {', '.join(found) or 'none'}")
        return found[name]
    candidates = own or found
    if not candidates:
        raise RunError(f"{file} has no program: decorate a function with @sgl.function")
    if len(candidates) > 1:
        names = ", ".join(candidates)
        raise RunError(f"{file} has several programs, choose one with --program: {names}")
    return next(iter(candidates.values()))


def variables_of(options: argparse.Namespace) -> dict[str, object]:
    """The arguments of --vars, overridden by those of --var."""
    variables: dict[str, object] = {}
    if options.vars is not None:
        variables |= _json_object(_read(options.vars), str(options.vars))
    for given in options.var:
        name, sign, value = given.partition("=")
        if not sign or not name:
            raise RunError(f"--var needs NAME=VALUE, not {given!r}")
        variables[name] = _value(value)
    return variables


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(text: str) -> float:
    """NaN and Infinity are not JSON, so they are taken as text."""
    raise ValueError(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RunError(f"{path} cannot be read: {reason}") from None


def _json_object(text: str, where: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RunError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{where} is not a JSON object of arguments")
    return value


def _check_arguments(program: Program, given: Mapping[str, object], where: str) -> None:
    parameters = list(inspect.signature(program.func).parameters.values())[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    unknown = [name for name in given if name not in names]
    if unknown and not takes_any:
        known = ", ".join(names) or "none"
        raise RunError(
            f"{program.func.__name__} has no parameter {unknown[0]!r}{where}; it has: {known}"
        )
    have = {**program.bound, **given}
    missing = [p.name for p in named if p.default is p.empty and p.name not in have]
    if missing:
        how = " ".join(f"--var {name}=VALUE" for name in missing)
        needs = f"argument{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RunError(f"{program.func.__name__} needs the {needs}{where}: add {how}")


def _backend_of(options: argparse.Namespace, stack: ExitStack) -> Backend:
    if options.replay is not None:
        try:
            return Replay(options.replay)
        except OSError as error:
            raise RunError(f"{options.replay} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise RunError(str(error)) from None
    url = options.url or os.environ.get(URL_VARIABLE)
    backend: Backend
    if not url and global_config.default_backend is not None:
        backend = chosen_backend(None)
    else:
        try:
            backend = VLLM(url or DEFAULT_URL, api_key=options.api_key)
        except ValueError as error:
            raise RunError(str(error)) from None
    if options.record is not None:
        try:
            backend = stack.enter_context(Recorder(backend, options.record))
        except OSError as error:
            raise RunError(f"{options.record} cannot be written: {error.strerror}") from None
    return backend


# --- running -------------------------------------------------------------------------------------


def _sampling_of(options: argparse.Namespace) -> SamplingDefaults:
    sampling: SamplingDefaults = {}
    if options.temperature is not None:
        sampling["temperature"] = options.temperature
    if options.max_new_tokens is not None:
        sampling["max_new_tokens"] = options.max_new_tokens
    return sampling


def _run_once(
    program: Program, variables: dict[str, object], backend: Backend, options: argparse.Namespace
) -> int:
    _check_arguments(program, variables, "")
    state = _started(program.bind(**variables), backend, options)
    if options.stream:
        live(state)
    failure = _outcome(state, options.file)
    if options.json:
        print(json.dumps(as_json(program, state, failure), ensure_ascii=False))
    elif not options.stream:
        show(state)
    if options.html is not None:
        page = to_page(state, f"{program.func.__name__} of {options.file.name}")
        try:
            options.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise RunError(f"{options.html} cannot be written: {error.strerror}") from None
    if failure is not None:
        raise RunError(failure, FAILED)
    return 0


def _started(program: Program, backend: Backend, options: argparse.Namespace) -> ProgramState:
    """A run that has been started. Its state can be shown even if it fails."""
    body = program._body
    state = body.new_state(
        backend, run_defaults(**_sampling_of(options)), is_streamed=options.stream
    )
    body.start(state)
    return state


def _outcome(state: ProgramState, file: Path) -> str | None:
    """Wait for the whole run. Returns its error in one line, or None."""
    run = state._stream.run
    try:
        state._wait_for_body()
        run.background.wait_for(run.check())
    except ProgramError as error:
        return _one_line(str(error))
    except Exception as error:
        return f"the program raised {_described(error, file)}"
    except KeyboardInterrupt:
        run.cancel()
        raise
    return None


def _run_batch(
    program: Program, common: dict[str, object], backend: Backend, options: argparse.Namespace
) -> int:
    items = []
    for number, line in enumerate(_read(options.batch).splitlines(), start=1):
        if line.strip():
            where = f"line {number} of {options.batch}"
            item = {**common, **_json_object(line, where)}
            _check_arguments(program, item, f" ({where})")
            items.append(item)
    if not items:
        raise RunError(f"{options.batch} is empty")
    results: Sequence[ProgramState | BaseException] = program.run_batch(
        items, backend=backend, progress_bar=True, return_errors=True, **_sampling_of(options)
    )
    num_failed = 0
    for number, result in enumerate(results, start=1):
        if isinstance(result, BaseException):
            num_failed += 1
            failure = (
                _one_line(str(result))
                if isinstance(result, ProgramError)
                else f"the program raised {_described(result, options.file)}"
            )
            print(json.dumps({"error": failure}) if options.json else f"{number}: ✗ {failure}")
        elif options.json:
            print(json.dumps(as_json(program, result, None), ensure_ascii=False))
        else:
            shown = json.dumps(_plain(_values_of(result)), ensure_ascii=False)
            print(f"{number}: {shown}")
    if num_failed:
        raise RunError(f"{num_failed} of {len(items)} runs failed", FAILED)
    return 0


# --- what is printed -----------------------------------------------------------------------------


def as_json(program: Program, state: ProgramState, failure: str | None) -> dict[str, object]:
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
    if callable(dump := getattr(value, "model_dump", None)):  # a pydantic model
        plain: object = dump(mode="json")
        return plain
    if isinstance(value, Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


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
