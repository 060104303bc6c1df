"""The file that shows that a check is running, or that the last one did not finish.

Owns its place, its lock and its key. A check holds a lock on its file until it ends, and then
removes the file. A file without a lock was left by a process that died during its check, for
example by a device fault. Several engines may check at once. Imports no vLLM.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

FOLDER_ENV = "SGL_VLLM_CACHE"


def default_folder() -> Path:
    """`$SGL_VLLM_CACHE`, else `sgl_vllm` in the user's cache folder, else in one for all users."""
    if named := os.environ.get(FOLDER_ENV):
        return Path(named) / "self_check"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        cache = Path(tempfile.gettempdir())
    return cache / "sgl_vllm" / "self_check"


class Marker:
    """The marker files of one configuration.

    Args:
        folder: made when a file is first written.
        facts: what the configuration is; in the file, for people who read it.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object]) -> None:
        self._folder = folder
        self._facts = facts
        text = json.dumps(facts, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def abandoned(self) -> list[Path]:
        """The files of checks that their engine did not survive."""
        with contextlib.suppress(OSError):
            return [path for path in sorted(self._folder.glob(f"{self._key}-*")) if _is_free(path)]
        return []

    def forget(self) -> None:
        """Remove the files of checks that their engine did not survive, to try again."""
        for path in self.abandoned():
            _remove(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, a file exists. An exception other than `DeviceLost` removes it too, and so
        does a signal to stop, after which the process may be killed before the check has ended.

        If the file cannot be written or locked, the check runs without one.
        """
        try:
            path, handle = self._begin()
        except OSError:
            yield
            return
        is_alive = True
        try:
            with _removed_at_a_stop(path):
                yield
        except DeviceLost:
            is_alive = False
            raise
        finally:
            if is_alive:
                _remove(path)
            os.close(handle)

    def _begin(self) -> tuple[Path, int]:
        """Write and lock a file, and give it its name only then: a file without a lock would count
        as abandoned."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".tmp", "new-", self._folder)
        path = Path(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, json.dumps(self._facts, indent=1, default=str).encode())
            os.fsync(handle)
            return path.rename(path.with_name(f"{self._key}-{path.stem}.json")), handle
        except BaseException:
            os.close(handle)
            _remove(path)
            raise


class DeviceLost(RuntimeError):
    """After a check the engine cannot run a plain request any more."""


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def _removed_at_a_stop(path: Path) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT remove the file before their previous handlers run. Python
    handles signals in the main thread only; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    usual = {number: handler for number, handler in handlers.items() if handler is not None}

    def stop(number: int, frame: FrameType | None) -> None:
        _remove(path)
        signal.signal(number, usual[signal.Signals(number)])
        signal.raise_signal(number)

    for number in usual:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in usual.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock of a file. Open for writing, because a file system that is
    mounted over a network may lock nothing else; shared, because two engines may look at once."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)
