"""Programs of ``benches``, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.command import REPOSITORY, Ran, environment


def run_program(module: str, *arguments: str, **variables: str) -> Ran:
    """``python -m <module> <arguments>`` in the repository."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    return Ran(done.returncode, done.stdout, done.stderr)
