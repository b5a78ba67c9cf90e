"""Runs the suite: a copy of its tests, a Redis and a process for each file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benches.celery_suite import recorder
from tests.services import LOCALHOST, REPOSITORY, environment, own_redis, tethered

MODEL = "toy"
TESTS = Path("t", "integration")
OURS, STOCK = "ours", "stock"
_CUT_SHORT = (recorder.HUNG, pytest.ExitCode.INTERNAL_ERROR)
_CONFTEST = """\
from t.integration import celery_conftest

globals().update({k: v for k, v in vars(celery_conftest).items() if not k.startswith("__")})

from benches.celery_suite.fixtures import *
"""


@dataclass(frozen=True)
class Outcome:
    """``verdict``: passed, failed, failed as expected, skipped, not collected."""

    test: str
    verdict: str
    message: str


@dataclass(frozen=True)
class Limits:
    """Seconds that a test may take, and one that is known to fail."""

    test_s: float
    hopeless_s: float


def files_of(sdist: Path) -> list[str]:
    """The names of the suite's files of tests."""
    return sorted(file.name for file in (sdist / TESTS).glob("test_*.py"))


def run(
    sdist: Path, contestant: str, files: Sequence[str], only: str, limits: Limits, folder: Path
) -> Iterator[Outcome]:
    """The outcome of each test in ``files`` for ``contestant``, file by file.

    ``only`` is pytest's expression of the tests to run, or empty. ``folder`` gets a log of pytest
    for each file.
    """
    with tempfile.TemporaryDirectory(prefix="celery-suite-") as place:
        copy = Path(place)
        # Only the tests: the copy of celery beside them would hide the installed one.
        shutil.copytree(sdist / "t", copy / "t", ignore=shutil.ignore_patterns("unit", "smoke"))
        shutil.copy(sdist / "pyproject.toml", copy)
        if contestant == OURS:
            conftest = copy / TESTS / "conftest.py"
            conftest.rename(conftest.with_name("celery_conftest.py"))
            conftest.write_text(_CONFTEST)
        for file in files:
            yield from _run_file(copy, file, only, limits, folder / f"{file}.{contestant}.log")


def _run_file(
    copy: Path, file: str, only: str, limits: Limits, log_file: Path
) -> Iterator[Outcome]:
    results = copy / f"{file}.outcomes"
    results.touch()
    seen = 0
    while True:
        with own_redis() as server:
            command = [
                sys.executable, "-m", "pytest", str(TESTS / file), "-k", only,
                "--quiet", "--tb=native",
                "-p", "no:benchmark", "-p", "no:cacheprovider",
                "-p", "celery.contrib.pytest", "-p", recorder.__name__,
                f"--suite-results={results}", f"--suite-timeout={limits.test_s}",
                f"--suite-hopeless-timeout={limits.hopeless_s}",
                *(f"--deselect={TESTS / outcome.test}" for outcome in _read(results)),
            ]  # fmt: skip
            url = server.url
            with log_file.open("ab") as log:
                done = subprocess.run(
                    tethered(*command),
                    cwd=copy,
                    env=environment(
                        url,
                        model_name=MODEL,
                        PYTHONPATH=f"{copy}:{REPOSITORY}",
                        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                        TEST_BROKER=url,
                        TEST_BACKEND=url,
                        REDIS_HOST=LOCALHOST,
                        REDIS_PORT=server.port,
                    ),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
        outcomes = _read(results)
        yield from outcomes[seen:]
        moved, seen = len(outcomes) > seen, len(outcomes)
        if done.returncode not in _CUT_SHORT or not moved:
            return


def _read(results: Path) -> list[Outcome]:
    lines = results.read_text().splitlines()
    return [
        Outcome(nodeid.removeprefix(f"{TESTS}/"), verdict, message)
        for nodeid, verdict, message in map(json.loads, lines)
    ]
