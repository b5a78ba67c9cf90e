"""Runs the commands with which orchestrators probe workers."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def assert_tells_age(command: str, path: str, folder: Path) -> None:
    """``command`` succeeds if the file ``path`` is fresh, and fails if it is old or missing."""
    assert path in command
    file = folder / "alive"

    def succeeds() -> bool:
        here = command.replace(path, str(file))
        done = subprocess.run(["sh", "-c", here], capture_output=True, check=False)
        return done.returncode == 0

    assert not succeeds()
    file.touch()
    assert succeeds()
    two_minutes_ago = time.time() - 120
    os.utime(file, (two_minutes_ago, two_minutes_ago))
    assert not succeeds()
    file.unlink()
