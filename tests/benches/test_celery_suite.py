"""The program that runs Celery's own tests, on a suite of three tests in the shape of Celery's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benches.celery_suite.__main__ import _is_unexplained
from benches.celery_suite.suite import OURS, STOCK, Outcome
from tests.benches.program import run_program

CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def celery_config():
    return {"broker_url": os.environ["TEST_BROKER"], "result_backend": os.environ["TEST_BACKEND"]}

@pytest.fixture(scope="session")
def celery_includes():
    return ["t.integration.tasks"]

@pytest.fixture
def app(celery_app):
    return celery_app
"""
TASKS = """
from celery import shared_task

@shared_task
def add(x, y):
    return x + y
"""
TESTS = """
import time
from .tasks import add

def test_add(celery_session_worker):
    assert add.delay(1, 2).get(timeout=60) == 3

def test_pool(celery_session_worker):
    assert type(celery_session_worker.pool).__name__ == "EnginePool"

def test_that_waits_for_ever():
    time.sleep(600)
"""


def test_each_test_runs_in_our_worker_and_in_stock_celery_s(tmp_path: Path) -> None:
    folder = tmp_path / "t" / "integration"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "test_add.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")

    ran = run_program("benches.celery_suite", f"--sdist={tmp_path}", "--json", "--timeout=5")

    verdicts = {
        test.partition("::")[2]: tuple(of[contestant]["verdict"] for contestant in (OURS, STOCK))
        for test, of in ran.json.items()
    }
    assert verdicts == {
        "test_add": ("passed", "passed"),
        "test_pool": ("passed", "failed"),
        "test_that_waits_for_ever": ("failed", "failed"),
    }, ran.err
    assert ran.code == 0, "no test fails here alone"


@pytest.mark.parametrize(
    ("ours", "stock", "unexplained"),
    [
        ("failed", "passed", True),
        ("not collected", None, True),
        ("not collected", "not collected", False),
        ("failed", "failed", False),
        (None, "passed", False),
    ],
)
def test_what_fails_or_cannot_be_read_in_our_worker_alone_needs_a_reason(
    ours: str | None, stock: str | None, unexplained: bool
) -> None:
    verdicts = {OURS: ours, STOCK: stock}
    of = {name: Outcome("test", verdict, "") for name, verdict in verdicts.items() if verdict}
    assert _is_unexplained("test_any.py", of) is unexplained
