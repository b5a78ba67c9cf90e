"""Runs pytest on the files of a folder, for tests of the suite's own plug-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forks import REPOSITORY


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs it with ``options`` to its end, with the two plug-ins alone that the tests of it
    use. The files may import what the tests may."""
    plugins = ("xdist", "pytest_rerunfailures")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": ",".join(plugins),
        },
        capture_output=True,
        text=True,
        check=False,
    )
