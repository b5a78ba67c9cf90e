"""Runs pytest on the files of a folder, for tests of the suite's own plug-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forks import REPOSITORY


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs it with ``options`` to its end. The files may import what the tests may."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
