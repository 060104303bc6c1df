"""The file that says that a check is under way, and that the last one did not survive.

Owns its place, its lock and its key. A check holds a lock on its file until it ends, and then
removes the file. A file that nobody has locked is left from a process that died in the middle:
a device fault, for example. Several engines may check at once. Pure.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

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


def key_of(facts: Mapping[str, object]) -> str:
    """A name for a configuration: equal facts have equal names."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Marker:
    """The marker files of one configuration.

    Args:
        folder: made when a file is first written.
        facts: what the configuration is; in the file, for people who read it.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object]) -> None:
        self._folder = folder
        self._facts = facts
        self._key = key_of(facts)

    def abandoned(self) -> list[Path]:
        """The files of checks that did not survive."""
        with contextlib.suppress(OSError):
            return [path for path in sorted(self._folder.glob(f"{self._key}-*")) if _is_free(path)]
        return []

    def forget(self) -> None:
        """Remove the files of checks that did not survive, so that one is tried again."""
        for path in self.abandoned():
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, a file exists. It also goes if an exception leaves, except `DeviceLost`.

        A folder that cannot be written is no reason not to check: then there is no file.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(".json", f"{self._key}-", self._folder)
        except OSError:
            yield
            return
        path = Path(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, json.dumps(self._facts, indent=1, default=str).encode())
            os.fsync(handle)
            yield
        except DeviceLost:
            raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


class DeviceLost(RuntimeError):
    """After a check the engine cannot run a plain request any more."""


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)
