"""Control groups of this machine with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

_ROOT = Path("/sys/fs/cgroup")
_FIRST_VERSION = _ROOT / "memory"


@contextmanager
def memory_group(most_bytes: int) -> Iterator[Path]:
    """The folder of a group whose processes may take ``most_bytes`` more than they have. It skips
    the test where groups cannot be made."""
    is_first_version = _FIRST_VERSION.is_dir()
    folder = (_FIRST_VERSION if is_first_version else _ROOT) / f"llorch-{uuid4().hex}"
    try:
        if not is_first_version:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError:
        pytest.skip("control groups of memory cannot be made here")
    limit = "memory.limit_in_bytes" if is_first_version else "memory.max"
    (folder / limit).write_text(str(most_bytes))
    if (swap := folder / "memory.swap.max").exists():
        swap.write_text("0")
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()
