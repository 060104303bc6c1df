"""Blocks in files that tell whether they are what was written. Pure: no vLLM.

A file is the block and one page more, the seal, so that both can bypass the page cache:

    | block: whole pages ... | b"sgl_vllm kv 1\n\0\0", BLAKE3 of name and block, zeros |

The name is part of the checksum: a file in the place of another is noticed too.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

from blake3 import blake3

_MAGIC = b"sgl_vllm kv 1\n\0\0"


class DamagedFile(OSError):
    """The file is not what was written."""


def write(path: str, name: bytes, block: memoryview, flags: int = 0) -> None:
    """Put `block`, a whole number of pages, there in one step, unless there is a file already.

    Args:
        name: what the block is looked up by.
        flags: more for `os.open`: `os.O_DIRECT`.

    Raises:
        OSError: it cannot be written; nothing is there then.
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
            raise OSError(f"{num_written} of {len(block) + mmap.PAGESIZE} bytes fit into {path}")
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.remove(unfinished)
        raise


def read(path: str, name: bytes, block: memoryview, flags: int = 0) -> None:
    """Fill `block` with what was written there under `name`.

    Raises:
        DamagedFile: it is something else. The file is removed, so that the block can be written
            again; what `block` holds is undefined.
        OSError: it cannot be read, or there is none.
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
    """A page."""
    checksum = blake3(name).update(block).digest()
    return (_MAGIC + checksum).ljust(mmap.PAGESIZE, b"\0")
