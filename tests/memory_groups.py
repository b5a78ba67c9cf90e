"""Control groups of this machine with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest


@contextmanager
def memory_group(most_bytes: int) -> Iterator[Path]:
    """The folder of a group whose processes may take ``most_bytes`` more than they have. It skips
    the test where groups cannot be made."""
    folder = Path(f"/sys/fs/cgroup/memory/llorch-{uuid4().hex}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("control groups of memory cannot be made here")
    (folder / "memory.limit_in_bytes").write_text(str(most_bytes))
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()
