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
"""Of each file its name, inode, bytes and time of change."""


def revision(path: Path) -> Revision:
    """That of a file with its parts, or of what a load reads of a folder. Costs a ``stat`` each.
    What is not there counts for nothing: a load says so."""
    return frozenset(_found(path))


def _found(path: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        if path.is_dir():
            files = [file for file in path.iterdir() if FOLDER_FILES.fullmatch(file.name)]
        else:
            files = [*split_parts(path)]
    except (OSError, ModelLoadFailed):
        return
    for file in files:
        with suppress(OSError):
            found = os.stat(file)
            yield file.name, found.st_ino, found.st_size, found.st_mtime_ns
