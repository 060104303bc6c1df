"""Files of KV blocks with a checksum, so that a damaged file is noticed. Pure: no vLLM.

A file is the block, in whole pages, and one more page, the seal. Both can bypass the page cache:

    | block: whole pages ... | b"sgl_vllm kv 1\n\0\0", BLAKE3 of name and block, zeros |

The checksum includes the name, so a file in the place of another one is noticed too.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

from blake3 import blake3

_MAGIC = b"sgl_vllm kv 1\n\0\0"


class DamagedFile(OSError):
    """The file does not hold what was written."""


def write(path: str, name: bytes, block: memoryview, flags: int = 0) -> None:
    """Write `block`, a whole number of pages, atomically. Does nothing if the file exists.

    Args:
        name: the block's key.
        flags: further flags for `os.open`, such as `os.O_DIRECT`.

    Raises:
        OSError: the file cannot be written. No file is left behind.
    """
    if os.path.exists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    unfinished = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        file = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o644)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                page[:] = _seal(name, block)
                num_written = os.writev(file, [block, page])
        finally:
            os.close(file)
        if num_written != len(block) + mmap.PAGESIZE:
            raise OSError(
                f"only {num_written} of {len(block) + mmap.PAGESIZE} bytes were written "
                f"to {path}: is the disk full?"
            )
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.remove(unfinished)
        raise


def read(path: str, name: bytes, block: memoryview, flags: int = 0) -> None:
    """Read the block that was written under `name` into `block`.

    Raises:
        DamagedFile: the file holds something else. It is removed, so that the block can be written
            again. The contents of `block` are undefined.
        OSError: the file is missing or cannot be read.
    """
    file = os.open(path, os.O_RDONLY | flags)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            num_read = os.readv(file, [block, page])
            is_whole = num_read == len(block) + mmap.PAGESIZE and page[:] == _seal(name, block)
    finally:
        os.close(file)
    if not is_whole:
        with suppress(OSError):
            os.remove(path)
        raise DamagedFile(f"{path} is damaged and is removed; its tokens are computed again")


def _seal(name: bytes, block: memoryview) -> bytes:
    """The seal of a block: one page."""
    checksum = blake3(name).update(block).digest()
    return (_MAGIC + checksum).ljust(mmap.PAGESIZE, b"\0")
