"""Programs of ``benches``, run as a user runs them."""

from __future__ import annotations

from tests.cli.command import Ran, environment
from tests.forks import REPOSITORY, run_forked


def run_program(module: str, *arguments: str, **variables: str) -> Ran:
    """``python -m <module> <arguments>`` in the repository, in a fork: see :mod:`tests.forks`."""
    done = run_forked(
        module, *arguments, environment=environment(**variables), timeout_s=150, folder=REPOSITORY
    )
    return Ran(done.returncode, done.stdout, done.stderr)
