"""A file beside the weights of a model: read whole, within its bound.

A pipe or device in its place would keep a reader waiting, or never end.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.values import excess_of
from llorch_worker.model_files.bounds import JSON, file_bound, require

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> int:
    """A descriptor to read ``path`` from. Raises ModelLoadFailed, at once, for all but a file."""
    try:
        _require_file(path, os.stat(path))  # opening some devices has effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink() and not path.exists():
            raise ModelLoadFailed(
                f"{path} is a link to what does not exist; restore the file or remove the link."
            ) from error
        raise ModelLoadFailed(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions."
        ) from error
    try:
        _require_file(path, os.fstat(descriptor))
    except ModelLoadFailed:
        os.close(descriptor)
        raise
    return descriptor


def _require_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise ModelLoadFailed(
            f"{path} is {kind}, but must be a regular file; download the model again."
        )


def exists(path: Path) -> bool:
    """Whether the folder has such an entry, of whatever kind. A broken link is one."""
    return os.path.lexists(path)


def read_bytes(path: Path) -> bytes:
    """The content. Raises ModelLoadFailed if it is no regular file, too large or unreadable."""
    bound = file_bound(path.name)
    with os.fdopen(open_regular(path), "rb") as file:
        require(path, "its size", os.fstat(file.fileno()).st_size, bound)
        try:
            content = file.read(bound.most + 1)
        except OSError as error:
            raise ModelLoadFailed(
                f"{path} cannot be read ({error.strerror}); check the disk."
            ) from error
    require(path, "its size", len(content), bound)  # files of /proc say 0
    return content


def read_text(path: Path) -> str:
    """See :func:`read_bytes`; the content must be UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadFailed(f"{path} is not UTF-8; download the model again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """See :func:`read_text`; the content must be a JSON object."""
    try:
        return parse_object(read_text(path))
    except ValueError as error:
        raise ModelLoadFailed(f"{path} {error}; download the model again.") from error


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that ``text`` is. Raises ValueError, as a clause about a file."""
    # A list of 3 bytes takes 64 as an object.
    if (excess := excess_of(text.encode(errors="surrogatepass"), JSON)) is not None:
        raise ValueError(f"holds {excess.count} {excess.what}, but may hold at most {excess.most}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not valid JSON") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    return document
