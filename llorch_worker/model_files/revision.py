"""What changes when somebody replaces a model's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.hub import FOLDER_FILES
from llorch_worker.model_files.split_parts import split_parts

Revision = frozenset[tuple[str, int, int, int]]
"""Of each file its name in the folder, inode, bytes and time of change."""


def revision(path: Path) -> Revision:
    """That of a file with its parts, or of what a load reads of a folder. Costs a ``stat`` each.
    What is not there counts for nothing: a load says so."""
    return frozenset(_found(path))


def _found(path: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        if path.is_dir():
            there = (*path.iterdir(), *path.glob("*/*"))
            names = {file.relative_to(path).as_posix(): file for file in there}
            files = {name: file for name, file in names.items() if FOLDER_FILES.fullmatch(name)}
        else:
            files = {file.name: file for file in split_parts(path)}
    except (OSError, ModelLoadFailed):
        return
    for name, file in files.items():
        with suppress(OSError):
            found = os.stat(file)
            yield name, found.st_ino, found.st_size, found.st_mtime_ns
